"""Texts tokenised apart and put together equal what the checkpoint's own tokeniser makes of them."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from maxsimd.bench.datasets import Pair
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.tokenization import (
    PART_CHARACTERS,
    PART_TEXTS,
    Template,
    TextTokenizer,
    cut,
    in_parts,
    longest_first,
)
from tests.unit.engine.preprocess.preprocessing import (
    CLS,
    QUERY_MARKER,
    SEP,
    VOCABULARY,
    fast_tokenizer,
    ids,
    words,
)
from tests.unit.engine.preprocess.preprocessing import tokenizer as small_tokenizer


def _word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 50))
@example(9, 9, 5)
def test_longest_first_cuts_as_the_tokenizers_library_does(first: int, second: int, room: int) -> None:
    tokenizer = _word_tokenizer()
    tokenizer.enable_truncation(room, strategy="longest_first")
    encoding = tokenizer.encode("a " * first, "b " * second)
    lengths = encoding.ids.count(0), encoding.ids.count(1)
    assert longest_first(first, second, room) == lengths


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


def test_a_template_is_learned_with_its_types() -> None:
    made = small_tokenizer()
    assert (made.single.special_tokens, made.pair.special_tokens) == (2, 3)
    token_ids, types = made.pair.fill(np.array([20, 21], np.int32), np.array([22], np.int32))
    assert (token_ids.tolist(), types.tolist()) == ([CLS, 20, 21, SEP, 22, SEP], [0, 0, 0, 0, 1, 1])
    parts = [token_ids, types, *made.encode(["w0"], "documents"), *made.pair.ids, *made.pair.types]
    assert {part.dtype for part in parts} == {np.dtype(np.int32)}
    bare = small_tokenizer(special_tokens=False)
    assert (bare.single.special_tokens, bare.pair.special_tokens) == (0, 0)


def test_a_template_puts_everything_in_its_place() -> None:
    def arrays(*numbers: int) -> tuple[np.ndarray, ...]:
        return tuple(np.array([number], np.int32) for number in numbers)

    template = Template(arrays(1, 2, 3), arrays(4, 5, 6), (7, 8))
    token_ids, types = template.fill(*arrays(20, 21))
    assert (token_ids.tolist(), types.tolist()) == ([1, 20, 2, 21, 3], [4, 7, 5, 8, 6])


def test_whole_texts_and_their_way_back() -> None:
    made = small_tokenizer()
    assert [(start, encoding.ids, encoding.tokens) for start, encoding in made.read("w0 w1", "text")] == [
        (0, ids(2), ["w0", "w1"])
    ]
    assert made.token(CLS) == "[CLS]"
    assert made.decode([QUERY_MARKER, *ids(2)]) == "[QUERY] w0 w1", "special tokens included"
    assert made.token_id("w0") == ids(1)[0]
    assert made.vocabulary_size == VOCABULARY
    assert made.encode([], "documents") == []
    in_two_parts = made.encode(words(PART_TEXTS + 1).split(), "documents")
    assert np.concatenate(in_two_parts).tolist() == ids(PART_TEXTS + 1)


LENGTHS = st.sampled_from(
    [0, 1, PART_CHARACTERS // 2, PART_CHARACTERS - 1, PART_CHARACTERS, PART_CHARACTERS + 1]
)


@settings(max_examples=60)
@given(st.lists(LENGTHS, max_size=8))
@example([0] * (PART_TEXTS + 1))
@example([1] * PART_TEXTS)
@example([PART_CHARACTERS // 2] * 4)
def test_parts_of_many_texts_are_as_large_as_they_may_be(lengths: list[int]) -> None:
    texts = ["x" * length for length in lengths]
    parts = list(in_parts(texts))
    assert [text for part in parts for text in part] == texts
    sizes = [sum(map(len, part)) for part in parts]
    for part, size in zip(parts, sizes, strict=True):
        assert len(part) == 1 or (1 < len(part) <= PART_TEXTS and size <= PART_CHARACTERS)
    for part, size, following in zip(parts, sizes, parts[1:], strict=False):
        assert len(part) == PART_TEXTS or size + len(following[0]) > PART_CHARACTERS


def test_a_tokenizer_that_is_not_a_fast_one_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="object has no fast tokeniser"):
        TextTokenizer(object())


def test_the_tokenizers_own_padding_and_truncation_do_not_count() -> None:
    original = fast_tokenizer()
    original.backend_tokenizer.enable_padding(length=9)
    original.backend_tokenizer.enable_truncation(4)
    made = TextTokenizer(original)
    assert [len(tokens) for tokens in made.encode(["w0", words(7)], "documents")] == [1, 7]
    assert made.single.special_tokens == 2
