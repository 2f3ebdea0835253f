"""Long texts of all scripts and with all dividers of words are cut, and only where that changes nothing."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from maxsimd.engine.preprocess.break_characters import SPACES
from maxsimd.engine.preprocess.breaks import Breaks, find_breaks
from maxsimd.engine.preprocess.pieces import PIECE, cut_up, cut_up_backwards
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from tests.checkpoints.tokenizer_kinds import (
    CUT,
    QWEN,
    Kind,
    bert,
    byte_level,
    charsmap,
    qwen,
    sentencepiece,
)
from tests.unit.engine.preprocess.cut_texts import (
    DIVIDERS,
    SCRIPTS,
    WITHOUT_LETTERS,
    assert_pieces_equal_the_whole,
    cut_kind,
)

# The whitespace before which alone these cut texts: what is put before a piece that has no space there, and
# what has a token of its own in a text that is not split.
SPACES_OF = {"roberta": " ", "gemma": " \n"}
LENGTH = 1_200_000

# Marks behind anything, joiners, what newer versions of Unicode have, and what is joined with what follows.
ODD = st.sampled_from(
    [
        *("\u0301", "\u0338", "\u093f", "\u094d", "\u200d", "\u200c", "\u0e31", "\u05b8", "\u064b", "\u3099"),
        *("\u0f71", "\u103a", "\u103c", "\ufe0f", "\u20dd", "\u0e40", "\u0ec0", "\u0e33", "\uff9e", "\u0d4e"),
        *("\u0d7b", "\u09ce", "\u0600", "\u06dd", "\u1100", "\u1161", "\u11a8", "\ufdfa", "\u2581", "\u00a8"),
        *("\u00bd", "\u2026", "\ufffd", "\u200b", "\ufeff", "\x00", "\x1c", "\U0001f600", "\U00020000"),
        *("<mask>", "[MASK]", "[SEP]", "</s>", "'s", "''", "``", "/", "_", "<", "\u0149", "\u1e9e"),
    ]
)
WORDS = st.sampled_from([word for words in SCRIPTS.values() for word in words.split()])
SEPARATORS = st.sampled_from([*DIVIDERS.values(), *SPACES, "\n", ""])
RAGGED = st.lists(st.tuples(WORDS | WORDS | ODD, SEPARATORS), max_size=40).map(
    lambda parts: "".join(word + separator for word, separator in parts)
)


def repeated(words: str, length: int) -> str:
    return (words * (length // len(words) + 1))[:length]


@pytest.mark.parametrize("name", CUT)
@settings(max_examples=150)
@given(text=RAGGED)
def test_pieces_of_all_scripts_have_the_tokens_of_the_whole(name: str, text: str) -> None:
    tokenizer, breaks = cut_kind(name)
    assert_pieces_equal_the_whole(tokenizer, breaks, text, words=name != "gemma")


def _bert_with(pre_tokenizer: Any) -> Tokenizer:
    tokenizer = bert()
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def _unigram(*steps: Any, **options: Any) -> Tokenizer:
    mask = AddedToken("[MASK]", normalized=False)
    return sentencepiece(normalizers.Sequence([*steps]), pre_tokenizers.Metaspace(**options), mask)


_ONE_SPACE = normalizers.Replace(Regex(" {2,}"), " ")
_TAKES_SPACES = (AddedToken("<mask>", rstrip=True), AddedToken("[MASK]", rstrip=True, lstrip=True))
# Normalisers and pre-tokenisers in other combinations than the published kinds have.
OTHERS: dict[str, Kind] = {
    "NFD": lambda: byte_level(QWEN, normalizers.NFD()),
    "NFKC": lambda: byte_level(QWEN, normalizers.NFKC()),
    "no marks": lambda: byte_level(
        None, normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    ),
    "no marks and one space": lambda: _unigram(
        normalizers.NFKD(), normalizers.StripAccents(), charsmap(), _ONE_SPACE
    ),
    "SentencePiece's normaliser": lambda: byte_level(QWEN, charsmap()),
    "Nmt": lambda: byte_level(QWEN, normalizers.Nmt()),
    "all whitespace as one space": lambda: byte_level(None, normalizers.Replace(Regex(r"\s+"), " ")),
    "each space": lambda: _unigram(charsmap()),
    "a space in front of texts": lambda: _unigram(charsmap(), prepend_scheme="first"),
    "no space in front": lambda: _unigram(charsmap(), prepend_scheme="never"),
    "stripped": lambda: _unigram(normalizers.Strip(), charsmap()),
    "stripped and composed": lambda: _unigram(normalizers.Strip(), normalizers.NFKC(), _ONE_SPACE),
    "Whitespace": lambda: _bert_with(pre_tokenizers.Whitespace()),
    "WhitespaceSplit": lambda: _bert_with(pre_tokenizers.WhitespaceSplit()),
    "Punctuation": lambda: _bert_with(
        pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.WhitespaceSplit()])
    ),
    "tokens that take spaces": lambda: byte_level(QWEN, added=_TAKES_SPACES),
}


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=100)
@given(data=st.data())
def test_so_have_those_of_other_normalisers_and_pre_tokenisers(name: str, data: st.DataObject) -> None:
    tokenizer, breaks = _other(name)
    assert breaks.all("a b c") == [1, 3]
    assert_pieces_equal_the_whole(tokenizer, breaks, data.draw(RAGGED))


@functools.cache
def _other(name: str) -> tuple[Tokenizer, Breaks]:
    tokenizer = OTHERS[name]()
    breaks = find_breaks(tokenizer)
    assert breaks is not None
    return tokenizer, breaks


def _assert_taken(name: str, words: str) -> None:
    """A text longer than any that is read whole is cut into many pieces, from either end."""
    text, (_, breaks) = repeated(words, LENGTH), cut_kind(name)
    for cut_into in (cut_up, cut_up_backwards):
        pieces = list(cut_into(text, PIECE, breaks))
        assert max(stop - start for start, stop in pieces) < 2 * PIECE


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("script", SCRIPTS)
def test_long_texts_of_all_scripts_are_cut(name: str, script: str) -> None:
    _assert_taken(name, f"{SCRIPTS[script]} ")


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("divider", DIVIDERS)
def test_long_texts_with_all_dividers_are_cut(name: str, divider: str) -> None:
    between = DIVIDERS[divider]
    space = next(character for character in between if character.isspace())
    if space not in SPACES_OF.get(name, SPACES):
        pytest.skip("these texts are cut before spaces alone")
    for word in ("word", "Wort1", "\u0428", "\u0915\u093f", "e\u0301", "12"):
        _assert_taken(name, f"{word}{between}")


@pytest.mark.parametrize("name", ["bert", "bert_cased", "qwen", "llama_3", "xlm_roberta", "deberta"])
@pytest.mark.parametrize("words", WITHOUT_LETTERS)
def test_long_texts_without_letters_are_cut(name: str, words: str) -> None:
    _assert_taken(name, words)


@pytest.mark.parametrize("kind", [bert, qwen])
def test_a_long_text_of_all_scripts_is_tokenised(kind: Kind) -> None:
    parts = [f"{words}{between}" for words in SCRIPTS.values() for between in DIVIDERS.values()]
    unit = "".join(parts)
    made = TextTokenizer(SimpleNamespace(backend_tokenizer=kind()))
    # So that what is repeated begins and ends with a break.
    (once,) = made.encode([f" {unit}a"], "text")
    (tokens,) = made.encode([f" {unit}a" * (LENGTH // len(unit))], "text")
    assert tokens.tolist() == once.tolist() * (LENGTH // len(unit))


@pytest.mark.parametrize("name", ["bert", "qwen"])
def test_what_may_differ_on_the_other_side_ends_no_piece(name: str) -> None:
    """Joiners, marks of nothing, what is joined with what stands behind it, and what becomes a space."""
    _, breaks = cut_kind(name)
    for end in ("\u200d", "\u200c", " \u0301", "\u0600", "\u0d4e", "\u0e40", "\u2581", "\x00"):
        assert breaks.all(f"{end} b") == [], ascii(end)
    assert breaks.all("\ufffd b") == ([] if name == "bert" else [1]), "BERT removes it"


def test_what_a_newer_unicode_has_ends_pieces_as_far_as_the_tokeniser_has_it() -> None:
    """A mark of 2008 that the library has too, and a letter of 2005."""
    marks_end_words = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
    breaks = find_breaks(byte_level(marks_end_words))
    assert breaks is not None
    assert breaks.all("\u1000\u103a\na") == [2]
    # A letter that a library may take for a sign, to which this pattern joins the end of a line.
    assert breaks.all("\u2d30 a\u2d30\na") == [1, 5]
