"""A text cut at any of its breaks has, piece by piece, the tokens and words of the whole."""

import functools
import json
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from maxsimd.engine.preprocess.breaks import Breaks, find_breaks
from tests.checkpoints import tokenizer_kinds
from tests.checkpoints.tokenizer_kinds import CUT, QWEN, WHOLE, byte_level, charsmap, sentencepiece
from tests.unit.engine.preprocess.cut_texts import assert_pieces_equal_the_whole, cut_kind

SEPARATED = st.sampled_from(["a", "the", "B", "1", "23", "\u6f22", " ", "\n", ",", ".", "x y", "a,b"])
# What rules look at: whitespace of all kinds, punctuation, quotes, marks, scripts, emoji, what is removed,
# and tokens of the kinds.
ODD = st.sampled_from(
    [
        *("  ", "   ", "\r\n", "\n\n", "\t", "\u00a0", "\u3000", "\u200b", "\u2028", "\u2581", "\ufeff"),
        *(
            "'s",
            "'",
            "''",
            "``",
            "don't",
            "_",
            "-",
            "/",
            "//",
            "<",
            ">",
            "=",
            "\u0338",
            '"',
            "3.14",
            "\u2026",
        ),
        *(
            "\u0301",
            "e\u0301",
            "\u00e9",
            "\u0130",
            "\ufb01",
            "\u304b\u3099",
            "\uff76\uff9e",
            "\u1100\u1161\u11a8",
        ),
        *(
            "\ud55c",
            "\u0439",
            "\u03c2",
            "\u0628\u064b",
            "\u0915\u094d\u0937",
            "\u0e01\u0e33",
            "\u0d4e",
            "\u0600",
        ),
        *("\u3001", "\u3002", "\uff0c", "\uff01", "\u300c", "\U00020000", "\u00bd", "\u2160"),
        *("\U0001f600", "\U0001f468\u200d\U0001f469", "1\ufe0f\u20e3", "\U0001f1e9\U0001f1ea"),
        *("\x00", "\x07", "\ufffd", "\x85"),
        *("[SEP]", "[MASK]", "<s>", "<mask>", " <mask>", "<|im_start|>", "<think>", "|||IP_ADDRESS|||"),
    ]
)
TEXTS = st.lists(SEPARATED | ODD | st.characters(exclude_categories=["Cs"]), max_size=60).map("".join)


@pytest.mark.parametrize("name", CUT)
@given(text=TEXTS)
@example(text="a b,c\nd. e \u6f22\u5b57\u3002\u304b\u306a a,1 2,b")
@example(text="a\n\n<mask>b  <mask> c <mask>, d\n<mask>")
@example(text="'s a's b'S 'll\n'd a' s")
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str) -> None:
    tokenizer, breaks = cut_kind(name)
    # Where a whole text is a word, so is each of its pieces.
    assert_pieces_equal_the_whole(tokenizer, breaks, text, words=name != "gemma")


@pytest.mark.parametrize("name", CUT)
def test_prose_has_a_place_at_least_at_every_other_word(name: str) -> None:
    _, breaks = cut_kind(name)
    text = "The quick brown fox jumps over the lazy dog and runs away from all of us"
    assert len(breaks.all(text)) == text.count(" ")
    assert len(breaks.all(text.replace(" ", "\n"))) >= (
        0 if name in ("gemma", "roberta") else text.count(" ")
    )
    russian = (
        "\u0411\u044b\u0441\u0442\u0440\u0430\u044f \u043b\u0438\u0441\u0430 \u0431\u0435\u0436\u0438\u0442"
    )
    assert len(breaks.all(russian)) == 2


def test_chinese_is_cut_at_punctuation_and_for_bert_anywhere() -> None:
    text = "\u6f22\u5b57\u6f22\uff0c\u5b57\u6f22\u3002\u5b57"
    assert cut_kind("qwen")[1].all(text) == [3, 6]
    assert cut_kind("bert")[1].all(text) == [1, 2, 3, 5, 6]
    assert cut_kind("xlm_roberta")[1].all(text) == []


@pytest.mark.parametrize("name", WHOLE)
def test_where_nothing_is_certain_there_are_no_places(name: str) -> None:
    assert find_breaks(WHOLE[name]()) is None


def _changed(tokenizer: Tokenizer, **components: Any) -> Tokenizer:
    described = json.loads(tokenizer.to_str()) | components
    return Tokenizer.from_str(json.dumps(described))


UNKNOWN_STEPS = {
    "a pattern": lambda: byte_level(QWEN.replace(r"\p{N}|", r"\p{N}+\s|")),
    "a pattern that keeps its matches only": lambda: _split(QWEN, "removed"),
    "scripts": lambda: _pre_tokenized(pre_tokenizers.UnicodeScripts()),
    "a delimiter": lambda: _pre_tokenized(pre_tokenizers.CharDelimiterSplit("a")),
    "punctuation that joins words": lambda: _pre_tokenized(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Punctuation("merged_with_previous"), pre_tokenizers.Whitespace()]
        )
    ),
    "words after they were changed": lambda: _pre_tokenized(
        pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(), pre_tokenizers.Whitespace()])
    ),
    "a normaliser": lambda: byte_level(normalizer=normalizers.Prepend("x")),
    "a pattern that is replaced": lambda: byte_level(normalizer=normalizers.Replace(Regex("a b"), "c")),
    "words that are replaced": lambda: byte_level(normalizer=normalizers.Replace("a b", "c")),
    "bytes": lambda: byte_level(normalizer=normalizers.ByteLevel()),
}


def _split(pattern: str, behavior: str) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior)
    return tokenizer


def _pre_tokenized(step: Any) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = step
    return tokenizer


@pytest.mark.parametrize("name", UNKNOWN_STEPS)
def test_a_tokeniser_with_a_step_that_is_on_no_list_has_no_places(name: str) -> None:
    assert find_breaks(UNKNOWN_STEPS[name]()) is None


ADDED = {
    "one that spans words": (AddedToken("hello world", normalized=False), "say hello world to hello, world"),
    "one that spans words when normalised": (AddedToken("a,b", normalized=True), "1 a,b 2,a,b"),
    "one that begins with a space": (AddedToken(" b", single_word=True), "a b a, b c b"),
    "one that takes the space behind it": (AddedToken("ab", rstrip=True), "c ab d ab, ab\ne"),
    "one that takes the spaces before it": (AddedToken("[X]", lstrip=True), "c [X] d\n[X]e?\n[X]"),
    "one that ends a line": (AddedToken("ab\n", single_word=True), "c ab\nd"),
    "one that spans lines": (AddedToken(".\nb", normalized=False), "a.\nb.\nc"),
}


@pytest.mark.parametrize("name", ADDED)
@given(extra=st.lists(SEPARATED, max_size=10).map("".join))
def test_added_tokens_are_not_cut(name: str, extra: str) -> None:
    token, text = ADDED[name]
    tokenizer, breaks = _with_added(token)
    assert_pieces_equal_the_whole(tokenizer, breaks, f"{extra}{text}{extra}{text}")


@functools.cache
def _with_added(token: AddedToken) -> tuple[Tokenizer, Breaks]:
    tokenizer = byte_level(QWEN, added=(token,))
    breaks = find_breaks(tokenizer)
    assert breaks is not None
    return tokenizer, breaks


def test_text_that_gets_a_space_in_front_is_cut_before_spaces_alone() -> None:
    for name in ("roberta", "xlm_roberta"):
        assert cut_kind(name)[1].all("a,b a") == [3]


def test_a_stripped_piece_must_begin_with_a_word_and_get_its_space_back() -> None:
    tokenizer, breaks = cut_kind("deberta")
    assert breaks.all("a b  a , [MASK] d") == [1, 3, 6, 15]
    assert tokenizer.normalizer.normalize_str(" b") == "b"
    strip = normalizers.Sequence([normalizers.Strip(), charsmap()])
    for scheme in ("first", "never"):
        bare = sentencepiece(strip, pre_tokenizers.Metaspace(prepend_scheme=scheme))
        assert find_breaks(bare) is None
    with_word = sentencepiece(strip, pre_tokenizers.Metaspace(), AddedToken("mask", normalized=False))
    assert find_breaks(with_word) is None


GEMMA_CHANGES: dict[str, dict[str, Any]] = {
    "a token with a space inside": {"vocab": "a\u2581"},
    "a token of bytes with a space behind": {"vocab": "<0x41>\u2581"},
    "words that are tokens whatever the merges": {"ignore_merges": True},
    "marks at the ends of words": {"end_of_word_suffix": "</w>"},
    "marks within words": {"continuing_subword_prefix": "##"},
}


@pytest.mark.parametrize("name", GEMMA_CHANGES)
def test_text_without_words_is_cut_only_where_no_token_reaches(name: str) -> None:
    described = json.loads(tokenizer_kinds.gemma().to_str())["model"]
    change = dict(GEMMA_CHANGES[name])
    if token := change.pop("vocab", None):
        described["vocab"][token] = len(described["vocab"])
    changed = _changed(tokenizer_kinds.gemma(), model=described | {"merges": []} | change)
    breaks = find_breaks(changed)
    assert breaks is None or breaks.all("a b") == []
    unchanged = find_breaks(_changed(tokenizer_kinds.gemma(), model=described | {"merges": []}))
    assert token or (unchanged is not None and unchanged.all("a b") == [1])


def test_all_letters_before_a_place_are_letters_or_digits_to_python_and_to_the_library() -> None:
    """In every normal form: what a pattern takes for a letter ends a word before what is none."""
    for name in ("qwen", "albert", "bert"):
        tokenizer, breaks = cut_kind(name)
        separator = " " if name == "albert" else ","
        letters = [
            letter
            for letter in map(chr, range(0xD800))
            if unicodedata.category(letter)[0] in "LN" and breaks.all(f"{letter}{separator}a")
        ]
        assert len(letters) > 40_000
        text = separator.join(letters)
        ends = [breaks.first(text, 2 * i + 1, 2 * i + 2) for i in range(len(letters) - 1)]
        assert ends == list(range(1, len(text), 2))
        assert_pieces_equal_the_whole(tokenizer, breaks, text)


def test_a_letter_that_is_none_when_normalised_has_no_place_behind_it() -> None:
    decomposing = find_breaks(byte_level(QWEN, normalizers.NFD()))
    composing = find_breaks(byte_level(QWEN, normalizers.NFC()))
    assert decomposing is not None
    assert composing is not None
    assert (decomposing.all("\u00e9,b"), composing.all("\u00e9,b")) == ([], [1])
    assert (decomposing.all("\u00e9\nb"), composing.all("\u00e9\nb")) == ([2], [1])


def test_the_first_place_is_looked_for_between_bounds() -> None:
    _, breaks = cut_kind("qwen")
    text = "ab cd ef"
    assert [breaks.first(text, start, 8) for start in range(7)] == [2, 2, 2, 5, 5, 5, None]
    assert [breaks.first(text, 0, stop) for stop in (2, 3, 9)] == [None, 2, 2]
    assert [breaks.first(text, 5, stop) for stop in (5, 6)] == [None, 5]
