"""Texts tokenised apart and put together equal what the checkpoint's own tokeniser makes of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from maxsimd.bench.datasets import Pair
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.tokenization import TextTokenizer, cut, longest_first


def _word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 50))
def test_longest_first_cuts_as_the_tokenizers_library_does(first: int, second: int, room: int) -> None:
    tokenizer = _word_tokenizer()
    tokenizer.enable_truncation(room, strategy="longest_first")
    encoding = tokenizer.encode("a " * first, "b " * second)
    kept = encoding.ids.count(0), encoding.ids.count(1)
    assert longest_first(first, second, room) == kept


@pytest.mark.parametrize("checkpoint", ["bert_cross_encoder", "xlm_roberta_cross_encoder", "qwen3_embedding"])
@pytest.mark.parametrize("max_tokens", [512, 40, 9])
def test_pairs_and_single_texts_equal_the_tokenizer(
    request: pytest.FixtureRequest, pairs: list[Pair], checkpoint: str, max_tokens: int
) -> None:
    original = AutoTokenizer.from_pretrained(request.getfixturevalue(checkpoint))
    ours = TextTokenizer(original)
    samples = [(pair.query, pair.document) for pair in pairs[:40]] + [
        ("", "x"),
        ("x", ""),
        ("ümlaut Ł 漢字", "🙂 ok"),
    ]
    for query, document in samples:
        q, d = ours.encode([query, document], "texts")
        lengths = longest_first(len(q), len(d), max_tokens - ours.pair.special_tokens)
        ids, types = ours.pair.fill(cut(q, lengths[0], "right"), cut(d, lengths[1], "right"))
        expected = original([query], [document], truncation="longest_first", max_length=max_tokens)
        assert ids.tolist() == expected["input_ids"][0]
        if "token_type_ids" in expected:
            assert types.tolist() == expected["token_type_ids"][0]
        alone, _ = ours.single.fill(cut(d, max_tokens - ours.single.special_tokens, "right"))
        assert alone.tolist() == original(document, truncation=True, max_length=max_tokens)["input_ids"]


def test_the_left_side_can_be_cut() -> None:
    assert cut(np.arange(5, dtype=np.int32), 2, "left").tolist() == [3, 4]
    assert cut(np.arange(5, dtype=np.int32), 9, "left").tolist() == [0, 1, 2, 3, 4]


def test_text_that_is_not_unicode_is_refused_by_name(bert_cross_encoder: str) -> None:
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(bert_cross_encoder))
    with pytest.raises(InvalidRequestError, match="not valid Unicode") as raised:
        tokenizer.encode(["fine", "broken \ud800"], "documents")
    assert raised.value.param == "documents"
