"""Texts tokenised apart and put together equal what the checkpoint's own tokeniser makes of them."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from maxsimd.bench.datasets import Pair
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.tokenization import (
    PART_TEXTS,
    TextTokenizer,
    cut,
    longest_first,
)
from tests.unit.engine.preprocess.preprocessing import (
    CLS,
    QUERY_MARKER,
    VOCABULARY,
    A,
    B,
    fast_tokenizer,
    ids,
    words,
)
from tests.unit.engine.preprocess.preprocessing import tokenizer as small_tokenizer


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 50))
@example(9, 9, 5)
def test_longest_first_cuts_as_the_tokenizers_library_does(first: int, second: int, room: int) -> None:
    library = fast_tokenizer(special_tokens=False).backend_tokenizer
    library.enable_truncation(room, strategy="longest_first")
    encoding = library.encode("a " * first, "b " * second)
    assert longest_first(first, second, room) == (encoding.ids.count(A), encoding.ids.count(B))


@pytest.mark.parametrize("checkpoint", ["bert_cross_encoder", "xlm_roberta_cross_encoder"])
def test_pairs_and_single_texts_equal_the_tokenizer(
    request: pytest.FixtureRequest, pairs: list[Pair], checkpoint: str
) -> None:
    original = AutoTokenizer.from_pretrained(request.getfixturevalue(checkpoint))
    ours = TextTokenizer(original)
    samples = [(pair.query, pair.document) for pair in pairs[:6]] + [
        ("", "x"),
        ("x", ""),
        ("ümlaut Ł 漢字", "🙂 ok"),
    ]
    for (query, document), most in product(samples, (512, 9)):
        q, d = ours.encode([query, document], "texts")
        lengths = longest_first(len(q), len(d), most - ours.pair.special_tokens)
        ids, types = ours.pair.fill(cut(q, lengths[0], "right"), cut(d, lengths[1], "right"))
        expected = original([query], [document], truncation="longest_first", max_length=most)
        assert ids.tolist() == expected["input_ids"][0]
        if "token_type_ids" in expected:
            assert types.tolist() == expected["token_type_ids"][0]
        alone, _ = ours.single.fill(cut(d, most - ours.single.special_tokens, "right"))
        assert alone.tolist() == original(document, truncation=True, max_length=most)["input_ids"]


def test_a_text_is_cut_on_either_side() -> None:
    text = np.arange(5, dtype=np.int32)
    for side, most, expected in (
        *(("left", 2, [3, 4]), ("left", 9, [0, 1, 2, 3, 4]), ("left", 5, [0, 1, 2, 3, 4]), ("left", 0, [])),
        *(("right", 4, [0, 1, 2, 3]), ("right", 5, [0, 1, 2, 3, 4]), ("right", 0, [])),
    ):
        assert cut(text, most, side).tolist() == expected  # type: ignore[arg-type]


def test_texts_become_tokens_and_tokens_texts() -> None:
    made = small_tokenizer()
    assert [(start, encoding.ids, encoding.tokens) for start, encoding in made.read("w0 w1", "text")] == [
        (0, ids(2), ["w0", "w1"])
    ]
    assert made.token(CLS) == "[CLS]"
    assert made.decode([QUERY_MARKER, *ids(2)]) == "[QUERY] w0 w1", "special tokens included"
    assert made.token_id("w0") == ids(1)[0]
    assert made.vocabulary_size == VOCABULARY
    in_two_parts = made.encode(words(PART_TEXTS + 1).split(), "documents")
    assert np.concatenate(in_two_parts).tolist() == ids(PART_TEXTS + 1)


def test_the_tokenizers_own_padding_and_truncation_do_not_count() -> None:
    original = fast_tokenizer()
    original.backend_tokenizer.enable_padding(length=9)
    original.backend_tokenizer.enable_truncation(4)
    made = TextTokenizer(original)
    assert [len(tokens) for tokens in made.encode(["w0", words(7)], "documents")] == [1, 7]
    assert made.single.special_tokens == 2
    with pytest.raises(InvalidRequestError, match="object has no fast tokeniser"):
        TextTokenizer(object())
