"""A text cut at any of its breaks has, piece by piece, the tokens and words of the whole."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from maxsimd.engine.processors.text.breaks import SPACES, find_breaks
from tests.checkpoints.tokenizer_kinds import QWEN, WHOLE, Kind, bert, byte_level, charsmap, sentencepiece
from tests.unit.engine.processors import split_texts
from tests.unit.engine.processors.split_texts import DIVIDERS, KINDS, SCRIPTS, cut_kind, usual_first

SEPARATED = st.sampled_from(["a", "the", "B", "1", "23", "\u6f22", " ", "\n", ",", ".", "x y", "a,b"])
# Characters that rules look at: whitespace of all kinds, punctuation, quotes, marks, joiners, scripts, emoji,
# removed ones, those of newer versions of Unicode, and tokens of the kinds.
_ODD = (
    "\r\n \n\n \t \u00a0 \u3000 \u200b \u2028 \u2581 \ufeff \x00 \x07 \x1c \ufffd \x85 's ' '' `` don't"
    ' _ - / // < > = \u0338 " 3.14 \u2026 \u3001 \u3002 \uff0c \uff01 \u300c \u00a8 \u0301 e\u0301'
    " \u00e9 \u0130 \ufb01 \u304b\u3099 \uff76\uff9e \u1100\u1161\u11a8 \ud55c \u0439 \u03c2"
    " \u0628\u064b \u0915\u094d\u0937 \u0e01\u0e33 \u0d4e \u0600 \U00020000 \u00bd \u2160 \u093f \u094d"
    " \u200d \u200c \u0e31 \u05b8 \u064b \u3099 \u0f71 \u103a \u103c \ufe0f \u20dd \u0e40 \u0ec0 \u0e33"
    " \uff9e \u0d7b \u09ce \u06dd \u1100 \u1161 \u11a8 \ufdfa \u0149 \u1e9e \U0001f600"
    " \U0001f468\u200d\U0001f469 1\ufe0f\u20e3 \U0001f1e9\U0001f1ea [SEP] [MASK] <s> </s> <mask>"
    " <|im_start|> <think> |||IP_ADDRESS|||"
)
ODD = st.sampled_from([*_ODD.split(" "), "  ", "   ", " <mask>"])
TEXTS = st.lists(SEPARATED | ODD | st.characters(exclude_categories=["Cs"]), max_size=60).map("".join)
# Words of all scripts, and all that divides words.
WORDS = st.sampled_from([word for words in SCRIPTS.values() for word in words.split()])
SEPARATORS = st.sampled_from([*DIVIDERS, *SPACES, "\n", ""])
RAGGED = st.lists(st.tuples(WORDS | WORDS | ODD, SEPARATORS), max_size=40).map(
    lambda parts: "".join(word + separator for word, separator in parts)
)
# The whitespace before which alone these cut texts: what is put before a piece that has no space there, and
# what has a token of its own in a text that is not split.
SPACES_OF = {"roberta": " ", "gemma": " \n"}


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=8)
@given(text=TEXTS | RAGGED)
@example(text="a b,c\nd. e \u6f22\u5b57\u3002\u304b\u306a a,1 2,b")
@example(text="a\n\n<mask>b  <mask> c <mask>, d\n<mask>")
@example(text="'s a's b'S 'll\n'd a' s")
@example(text="".join(f"{words}{between}" for words in SCRIPTS.values() for between in DIVIDERS))
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str) -> None:
    tokenizer, breaks = cut_kind(name)
    # Each piece of a text that is one word is a word, too.
    split_texts.assert_pieces_are_the_whole(tokenizer, breaks, text, words=name != "gemma")


@pytest.mark.parametrize("name", KINDS)
def test_there_are_breaks_in_prose_of_all_scripts(name: str) -> None:
    _, breaks = cut_kind(name)
    text = "The quick brown fox jumps over the lazy dog and runs away from all of us"
    assert len(breaks.all(text)) == text.count(" ")
    in_lines = len(breaks.all(text.replace(" ", "\n")))
    assert in_lines >= (0 if name in ("gemma", "roberta") else text.count(" "))
    assert len(breaks.all(SCRIPTS["Russian"])) == 2
    units = [f"{words} " for words in SCRIPTS.values()]
    for between in DIVIDERS:
        # Some texts are cut before spaces alone.
        if next(filter(str.isspace, between)) in SPACES_OF.get(name, SPACES):
            words = ("word", "Wort1", "\u0428", "\u0915\u093f", "e\u0301", "12")
            units += [f"{word}{between}" for word in words]
    if name in ("bert", "bert_cased", "qwen", "llama_3", "xlm_roberta", "deberta"):
        units += [
            "1, 2, 3, ", "\u2014 \u2014 ", "1. 2. ", "... ", "\u20ac 5 ", "3.14  ", "+\t-\t", "!\r\n?\r\n",
        ]  # fmt: skip
    for unit in units:
        length = len(unit)
        assert breaks.first(unit * 3, length, 2 * length + 1) is not None, ascii(unit)


def test_where_chinese_and_texts_with_a_space_in_front_are_cut() -> None:
    text = "\u6f22\u5b57\u6f22\uff0c\u5b57\u6f22\u3002\u5b57"
    assert cut_kind("qwen")[1].all(text) == [3, 6]
    assert cut_kind("bert")[1].all(text) == [1, 2, 3, 5, 6], "anywhere"
    assert cut_kind("xlm_roberta")[1].all(text) == []
    for name in ("roberta", "xlm_roberta"):
        assert cut_kind(name)[1].all("a,b a") == [3]


def _with_step(tokenizer: Tokenizer, *steps: Any) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps])
    return tokenizer


def _unigram(*steps: Any, **options: Any) -> Tokenizer:
    mask = AddedToken("[MASK]", normalized=False)
    return sentencepiece(normalizers.Sequence([*steps]), pre_tokenizers.Metaspace(**options), mask)


UNKNOWN_STEPS = {
    "a pattern": lambda: byte_level(QWEN.replace(r"\p{N}|", r"\p{N}+\s|")),
    "a pattern that keeps its matches only": lambda: _with_step(
        byte_level(), pre_tokenizers.Split(Regex(QWEN), "removed")
    ),
    "scripts": lambda: _with_step(byte_level(), pre_tokenizers.UnicodeScripts()),
    "a delimiter": lambda: _with_step(byte_level(), pre_tokenizers.CharDelimiterSplit("a")),
    "punctuation that joins words": lambda: _with_step(
        byte_level(), pre_tokenizers.Punctuation("merged_with_previous"), pre_tokenizers.Whitespace()
    ),
    "words after they were changed": lambda: _with_step(
        byte_level(), pre_tokenizers.ByteLevel(), pre_tokenizers.Whitespace()
    ),
    "a normaliser": lambda: byte_level(normalizer=normalizers.Prepend("x")),
    "a pattern that is replaced": lambda: byte_level(normalizer=normalizers.Replace(Regex("a b"), "c")),
    "words that are replaced": lambda: byte_level(normalizer=normalizers.Replace("a b", "c")),
    "bytes": lambda: byte_level(normalizer=normalizers.ByteLevel()),
    "stripped, a space in front": lambda: _unigram(normalizers.Strip(), charsmap(), prepend_scheme="first"),
    "stripped, no space in front": lambda: _unigram(normalizers.Strip(), charsmap(), prepend_scheme="never"),
}


@pytest.mark.parametrize("kind", [*UNKNOWN_STEPS.values(), *WHOLE.values()], ids=[*UNKNOWN_STEPS, *WHOLE])
def test_where_nothing_is_certain_there_are_no_breaks(kind: Kind) -> None:
    assert find_breaks(kind()) is None


_ONE_SPACE = normalizers.Replace(Regex(" {2,}"), " ")
_TAKES_SPACES = (AddedToken("<mask>", rstrip=True), AddedToken("[MASK]", rstrip=True, lstrip=True))

# Normalizers and pre-tokenizers in other combinations than the published kinds have.
OTHERS: dict[str, Kind] = {
    "NFD": lambda: byte_level(QWEN, normalizers.NFD()),
    "no marks": lambda: byte_level(
        None, normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    ),
    "no marks and one space": lambda: _unigram(
        normalizers.NFKD(), normalizers.StripAccents(), charsmap(), _ONE_SPACE
    ),
    "SentencePiece's normaliser": lambda: byte_level(QWEN, charsmap()),
    "Nmt": lambda: byte_level(QWEN, normalizers.Nmt()),
    "all whitespace as one space": lambda: byte_level(None, normalizers.Replace(Regex(r"\s+"), " ")),
    "a space in front of texts": lambda: _unigram(charsmap(), prepend_scheme="first"),
    "stripped": lambda: _unigram(normalizers.Strip(), charsmap()),
    "stripped and composed": lambda: _unigram(normalizers.Strip(), normalizers.NFKC(), _ONE_SPACE),
    "Whitespace": lambda: _with_step(bert(), pre_tokenizers.Whitespace()),
    "Punctuation": lambda: _with_step(bert(), pre_tokenizers.Punctuation(), pre_tokenizers.WhitespaceSplit()),
    "tokens that take spaces": lambda: byte_level(QWEN, added=_TAKES_SPACES),
}


@pytest.mark.parametrize(
    "name", usual_first(OTHERS, ("NFD", "no marks and one space", "stripped", "Punctuation"))
)
@settings(max_examples=5)
@given(text=RAGGED)
def test_so_have_pieces_after_other_steps(name: str, text: str) -> None:
    tokenizer, breaks = split_texts.with_breaks(OTHERS[name])
    assert breaks.all("a b c") == [1, 3]
    split_texts.assert_pieces_are_the_whole(tokenizer, breaks, text)


# Added tokens, each with a text that a cut inside of it would change.
ADDED: dict[str, tuple[AddedToken, str]] = {
    "spans words": (AddedToken("hello world", normalized=False), "say hello world to hello, world"),
    "spans words when normalized": (AddedToken("a,b", normalized=True), "1 a,b 2,a,b"),
    "begins with a space": (AddedToken(" b", single_word=True), "a b a, b c b"),
    "takes the space behind it": (AddedToken("ab", rstrip=True), "c ab d ab, ab\ne"),
    "takes the spaces before it": (AddedToken("[X]", lstrip=True), "c [X] d\n[X]e?\n[X]"),
    "ends a line": (AddedToken("ab\n", single_word=True), "c ab\nd"),
    "spans lines": (AddedToken(".\nb", normalized=False), "a.\nb.\nc"),
}


@pytest.mark.parametrize(("added", "text"), ADDED.values(), ids=ADDED)
def test_added_tokens_are_not_cut(added: AddedToken, text: str) -> None:
    tokenizer, breaks = split_texts.with_breaks(lambda: byte_level(QWEN, added=(added,)))
    for extra in ("", "a", " ", "\n", ",", ". ", "x y,", "\u6f22"):
        split_texts.assert_pieces_are_the_whole(tokenizer, breaks, f"{extra}{text}{extra}{text}")


GEMMA_CHANGES: dict[str, dict[str, Any]] = {
    "a token with a space inside": {"vocab": "a\u2581"},
    "a token of bytes with a space behind": {"vocab": "<0x41>\u2581"},
    "words that are tokens whatever the merges": {"ignore_merges": True},
    "marks at the ends of words": {"end_of_word_suffix": "</w>"},
    "marks within words": {"continuing_subword_prefix": "##"},
}


@pytest.mark.parametrize(
    "name", usual_first(GEMMA_CHANGES, ("a token with a space inside", "marks at the ends of words"))
)
def test_text_without_words_is_cut_where_no_token_reaches(name: str) -> None:
    described = json.loads(cut_kind("gemma")[0].to_str())
    few = {token: number for token, number in described["model"]["vocab"].items() if number < 2000}
    model = described["model"] | {"merges": [], "vocab": few}
    change = dict(GEMMA_CHANGES[name])
    if token := change.pop("vocab", None):
        few[token] = len(few)
    described["model"] = model | change
    breaks = find_breaks(Tokenizer.from_str(json.dumps(described)))
    assert breaks is None or breaks.all("a b") == []
    assert cut_kind("gemma")[1].all("a b") == [1], "without the change"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bert", "qwen", "albert"])
def test_letters_before_breaks_are_letters_to_the_library(name: str) -> None:
    tokenizer, breaks = cut_kind(name)
    separator = " " if name == "albert" else ","
    letters = [
        letter
        for letter in map(chr, range(0xD800))
        if unicodedata.category(letter)[0] in "LN" and breaks.all(f"{letter}{separator}a")
    ]
    assert len(letters) > 40_000
    split_texts.assert_pieces_are_the_whole(tokenizer, breaks, separator.join(letters))


@pytest.mark.parametrize("name", ["bert", "qwen"])
def test_what_may_differ_on_the_other_side_ends_no_piece(name: str) -> None:
    _, breaks = cut_kind(name)
    for end in ("\u200d", "\u200c", " \u0301", "\u0600", "\u0d4e", "\u0e40", "\u2581", "\x00"):
        assert breaks.all(f"{end} b") == [], ascii(end)
    assert breaks.all("\ufffd b") == ([] if name == "bert" else [1]), "BERT removes it"


def test_newer_unicode_ends_pieces_if_the_tokenizer_has_it() -> None:
    marks_end_words = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
    _, breaks = split_texts.with_breaks(lambda: byte_level(marks_end_words))
    assert breaks.all("\u1000\u103a\na") == [2]
    # A letter that a library may take for a sign, to which this pattern joins the end of a line.
    assert breaks.all("\u2d30 a\u2d30\na") == [1, 5]
