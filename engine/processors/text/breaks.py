"""Breaks: positions where a text can be split so that its pieces have the tokens of the whole.

Breaks are derived from the tokenizer's description. The lists of steps below name normalizers, pre-tokenizers
and patterns that treat both sides of a break apart as they do together; any other step means no breaks. A
sample proves the breaks at load. docs/internals/texts-and-pictures.md explains the three kinds of break.

The tokenizer is tried with whitespace, signs and line ends. Libraries differ in the version of Unicode: only
letters, digits and signs of Unicode 3.2 (2002) that Python's version classifies alike count as such.
"""

import functools
import hashlib
import json
import logging
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Literal, TypeAlias

from tokenizers import Tokenizer

from maxsimd.engine.checkpoint.recipe_store import keep, own_sources, read_kept
from maxsimd.engine.versions import versions_of

Kind = Literal["letter", "mark", "sign"]

# Characters are normalized this many at a time, joined by this text.
_AT_ONCE, _BETWEEN = 1024, " x "
# Unicode's whitespace.
SPACES = (
    " \t\n\x0b\x0c\r\x85\xa0\u1680"
    + "".join(map(chr, range(0x2000, 0x200B)))
    + "\u2028\u2029\u202f\u205f\u3000"
)
# SentencePiece's sign for a space.
SPACE_SIGN = "\u2581"
IDEOGRAPHS = "\u4e00-\u9fa5"
CHINESE_SIGNS = "\u3001\u3002\u300c\u300d\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
SIGNS = '"#$%&()*+,-./:;?@[]{}!|~' + CHINESE_SIGNS

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(["Lu", "Ll", "Lt", "Lm", "Lo", "Nd"], "letter"),
    **dict.fromkeys(["Mn", "Mc", "Me"], "mark"),
    **dict.fromkeys(["Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"], "sign"),
}
# Letters that form a cluster with the character before them (vowels of Thai and Lao, voiced sound marks), or
# in some versions of Unicode with the one behind them (other such vowels, a letter of Malayalam).
_JOINED = {*"\u0d4e\u0e33\u0eb3\uff9e\uff9f", *map(chr, [*range(0xE40, 0xE45), *range(0xEC0, 0xEC5)])}

# Normalizers that look no further than a grapheme cluster, or a letter and its marks: a break is at the end
# of both, and separators do not depend on the text before them. The replaced patterns begin with a space.
_LOCAL_NORMALIZERS = {
    *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Strip"),
    "StripAccents",
}
_REPLACED = {r" {2,}", r"\s+"}
# Settings by which a BPE model does more than merge neighbors.
_MORE_THAN_MERGES = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
# Pre-tokenizers that split by the class of each character, and those that do so within a word, at the end.
_BY_CLASS = {"BertPreTokenizer", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
_LAST = {"ByteLevel", "Metaspace"}
# Alternatives of the patterns by which byte-level tokenizers split. A word ends at each break, and neither
# side depends on the other: none matches a letter or digit and a separator behind it, or anything but a line
# end and a space behind it. None looks back, or further than the end of a run of whitespace.
_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_CONTRACTED = f"(?i:{'|'.join(_CONTRACTIONS)})"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_LETTER = r"[^\r\n\p{L}\p{N}]?"
_ALTERNATIVES = {
    *(*_CONTRACTIONS, _CONTRACTED, "'(?i:[sdmt]|ll|ve|re)"),
    *(r" ?\p{L}+", _NO_LETTER + r"\p{L}+", _NO_LETTER + r"+\p{L}+", _NO_LETTER + r"[\p{L}\p{M}]+"),
    *(f"{_NO_LETTER}{_CAPITALS}*{_SMALL}+{end}" for end in ("", f"{_CONTRACTED}?")),
    *(f"{_NO_LETTER}{_CAPITALS}+{_SMALL}*{end}" for end in ("", f"{_CONTRACTED}?")),
    *(r" ?\p{N}+", r"\p{N}", r"\p{N}{1,3}"),
    *(rf" ?[^\s\p{{L}}\p{{N}}]{end}" for end in ("+", r"+[\r\n]*", r"++[\r\n]*", r"+[\r\n/]*")),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
}

# Characters that are searched in a millisecond or so. Only lost spaces are looked at beyond the overlap.
_SEARCHED, _OVERLAP = 65_536, 256
# Late breaks are searched backwards, in steps that grow from this.
_STEP = 256
# The most marks of one letter.
_MOST_MARKS = 5
_LINE_ENDS = ("\r\n\r\n", "\n\n", "\r\n", "\n")
# Samples of each class of ends, some of every kind that a pattern may tell apart.
_LETTERS = ("a", "A", "1", "\u3042", "\u4e00")
_MARKED = ("e\u0301", "x\u0301", "\u0939\u093f", "\u0e17\u0e34", "\u05d0\u05b8")
_SIGNS = (".", ",", "!", "-", "_", "'", '"', ")", "+", "\u2014", "\u3002", "\u0964", "\u20ac")
# Classes of such ends in tokens: letters, bytes and unknowns; or anything but spaces.
_LETTER_ENDS, _ANY_ENDS = r"\w>\]", rf"^\0\s{SPACE_SIGN}"
# Samples of what may follow whitespace.
_REST = ("a", "1", ".", "\u4e00", " a", "  a", "\n", "\n\na", "\r\n.", "\ta", "")


@dataclass(frozen=True, slots=True)
class Ends:
    """Character classes of what a piece can end with, by what it is when normalized: `letters` and digits,
    `marked` letters, which become letter and mark, `marks` behind either, `signs`, and `newer` letters."""

    letters: str
    marked: str
    marks: str
    signs: str
    newer: str


@functools.cache
def kind_of(character: str) -> Kind | None:
    """Returns the kind of a character; None if libraries may differ, and for invisible ones."""
    now = _KINDS.get(unicodedata.category(character))
    then = _KINDS.get(unicodedata.ucd_3_2_0.category(character))
    return now if now == then and character not in _JOINED and character != SPACE_SIGN else None


def ends_of(normalize: Callable[[str], str], is_mark: Callable[[str], bool], no_ends: set[str]) -> Ends:
    """Finds what pieces can end with, except `no_ends`. `is_mark` tells marks of newer Unicode."""
    found: dict[str, list[str]] = {"letters": [], "marked": [], "marks": [], "signs": [], "newer": []}
    kinds = _characters()
    for letter, shown in _shown_each(normalize, kinds["letter"]):
        if shown == letter:
            found["letters"].append(letter)
        elif _is_visible(shown) and kind_of(shown[0]) == "letter" and kind_of(shown[-1]) != "sign":
            found["letters" if kind_of(shown[-1]) == "letter" else "marked"].append(letter)
    for sign, shown in _shown_each(normalize, kinds["sign"]):
        if _is_visible(shown) and kind_of(shown[-1]) == "sign" and shown[-1] not in no_ends:
            found["signs"].append(sign)
    marked = _normalized_each(normalize, [f"a{mark}" for mark in kinds["mark"]])
    for mark, shown in zip(kinds["mark"], marked, strict=True):
        # A mark may also be removed, or become one with its letter.
        if _is_visible(shown) and (kind_of(mark) or is_mark(mark)):
            found["marks"].append(mark)
    found["newer"] = [letter for letter, shown in _shown_each(normalize, kinds["newer"]) if shown == letter]
    return Ends(**{name: as_class(characters) for name, characters in found.items()})


def as_class(characters: Iterable[str]) -> str:
    """Writes characters as they stand between the brackets of a pattern."""
    ranges: list[list[int]] = []
    for code in map(ord, characters):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join("-".join(re.escape(chr(code)) for code in dict.fromkeys(each)) for each in ranges)


@functools.cache
def _characters() -> dict[Kind | Literal["newer"], str]:
    """Returns the characters of each kind; marks and `newer` letters need only Python's Unicode."""
    found: dict[Kind | Literal["newer"], list[str]] = {"letter": [], "mark": [], "sign": [], "newer": []}
    for character in map(chr, range(0x21, 0xFFFE)):
        kind = kind_of(character)
        if kind is not None:
            found[kind].append(character)
        elif unicodedata.ucd_3_2_0.category(character) == "Cn" and character not in _JOINED:
            now = _KINDS.get(unicodedata.category(character))
            if now in ("letter", "mark"):
                found["mark" if now == "mark" else "newer"].append(character)
    return {kind: "".join(characters) for kind, characters in found.items()}


def _shown_each(normalize: Callable[[str], str], characters: str) -> Iterator[tuple[str, str]]:
    """Yields each character with its normal form, without the spaces that BERT sets around ideographs."""
    for character, shown in zip(characters, _normalized_each(normalize, characters), strict=True):
        yield character, character if shown.strip() == character else shown


def _normalized_each(normalize: Callable[[str], str], texts: Sequence[str]) -> list[str]:
    """Normalizes texts without spaces: many in one call, fewer if the normalizer changes `_BETWEEN`."""
    if len(texts) > _AT_ONCE:
        parts = [texts[start : start + _AT_ONCE] for start in range(0, len(texts), _AT_ONCE)]
    elif len(shown := normalize(_BETWEEN.join(texts)).split(_BETWEEN)) == len(texts):
        return shown
    elif len(texts) == 1:
        return [normalize(texts[0])]
    else:
        parts = [texts[: len(texts) // 2], texts[len(texts) // 2 :]]
    return [shown for part in parts for shown in _normalized_each(normalize, part)]


def _is_visible(shown: str) -> bool:
    """Whether a normalized text consists of visible characters and their marks."""
    return bool(shown) and all(
        kind_of(character) is not None or unicodedata.category(character)[0] == "M" for character in shown
    )


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in texts before they are split, as written or as normalized."""

    contents: set[str]
    lstrip: bool
    rstrip: bool
    single_word: bool

    def spans(self, separators: str) -> bool:
        """Whether it can lie across a break before one of the separators, a class of characters."""
        return any(re.search(rf"\S[{separators}]", content) for content in self.contents)

    def looks_across(self, separator: str, shown: str) -> bool:
        """Whether it depends on the other side of a break before a separator, `shown` when normalized. A
        token that takes the spaces behind it and ends with a sign does not: that sign ends no piece."""
        return any(
            (self.single_word and content[:1] in (separator, shown))
            or (self.rstrip and separator in SPACES and kind_of(content[-1:] or " ") != "sign")
            for content in self.contents
        )

    @property
    def concerns_lines(self) -> bool:
        """Whether it can span or remove the end of a line, or depends on what follows it."""
        return self.lstrip or any(
            re.search(r"\s\S", content) or (self.single_word and content[-1:].isspace())
            for content in self.contents
        )


@dataclass(frozen=True, slots=True)
class Steps:
    """A tokenizer's steps. `merged` has a pure merging model's tokens between zeros, else ""."""

    normalizers: list[dict[str, Any]]
    pre_tokenizers: list[dict[str, Any]]
    added_tokens: list[AddedToken]
    merged: str

    @property
    def are_local(self) -> bool:
        """Whether neither side of a break affects the other."""
        if self.strip_spaces:
            # Then every piece must get a leading space in the end, and no added token be affected.
            contents = [text for token in self.added_tokens for text in token.contents]
            always = self._end["type"] == "Metaspace" and self._end["prepend_scheme"] == "always"
            if not always or any(re.match(r"[\w\s]", text) for text in contents):
                return False
        last = len(self.pre_tokenizers) - 1
        return all(map(_is_local_normalizer, self.normalizers)) and all(
            _is_local_split(step) or (i == last and step["type"] in _LAST)
            for i, step in enumerate(self.pre_tokenizers)
        )

    @property
    def strip_spaces(self) -> bool:
        """Whether a piece loses its leading spaces."""
        return any(step["type"] == "Strip" and step["strip_left"] for step in self.normalizers)

    @property
    def set_ideographs_apart(self) -> bool:
        """Whether each Chinese character is a word, as in BERT."""
        return (
            any(
                step["type"] == "BertNormalizer" and step["handle_chinese_chars"] for step in self.normalizers
            )
            and [step["type"] for step in self.pre_tokenizers] == ["BertPreTokenizer"]
            and not any(token.spans(IDEOGRAPHS) for token in self.added_tokens)
        )

    @property
    def give_spaces(self) -> bool:
        """Whether a piece without a leading space may get one."""
        end = self._end
        return end["type"] == "Metaspace" or (end["type"] == "ByteLevel" and bool(end["add_prefix_space"]))

    def merge_nothing_across(self, separator: str, ends: str) -> bool:
        """Whether no token has the separator behind one of `ends`, a class of all that pieces end with,
        including tokens for bytes and unknowns, in text that is not split."""
        if self._end["type"] in _LAST or f"\0{separator}\0" not in self.merged:
            return False
        return re.search(f"[{ends}]{re.escape(separator)}", self.merged) is None

    @property
    def _end(self) -> dict[str, Any]:
        return self.pre_tokenizers[-1] if self.pre_tokenizers else {"type": None}


def steps_of(tokenizer: Tokenizer) -> Steps:
    description = json.loads(tokenizer.to_str())
    model = description["model"]
    is_merged = model["type"] == "BPE" and not any(map(model.get, _MORE_THAN_MERGES))
    return Steps(
        _in_order(description["normalizer"], "normalizers"),
        _in_order(description["pre_tokenizer"], "pretokenizers"),
        [
            AddedToken(
                {token["content"], normalized(tokenizer, token["content"])},
                token["lstrip"],
                token["rstrip"],
                token["single_word"],
            )
            for token in description["added_tokens"]
        ],
        "\0".join(["", *model["vocab"], ""]) if is_merged else "",
    )


def normalized(tokenizer: Tokenizer, text: str) -> str:
    return text if tokenizer.normalizer is None else str(tokenizer.normalizer.normalize_str(text))


def _in_order(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Flattens nested sequences of steps."""
    if step is None:
        return []
    return [inner for part in step[name] for inner in _in_order(part, name)] if name in step else [step]


def _is_local_normalizer(step: dict[str, Any]) -> bool:
    if step["type"] != "Replace":
        return step["type"] in _LOCAL_NORMALIZERS
    pattern = step["pattern"]
    if "Regex" in pattern:
        return pattern["Regex"] in _REPLACED
    found, content = pattern["String"], step["content"]
    # A replacement of several characters must be visible at the end of a piece. Single ones are tried.
    is_seen = len(found) == 1 or kind_of(content[-1:] or " ") is not None
    return is_seen and not set(found[1:]) & {*SPACES, *SIGNS, SPACE_SIGN}


def _is_local_split(step: dict[str, Any]) -> bool:
    if step["type"] != "Split":
        return step["type"] in _BY_CLASS and step.get("behavior", "Isolated") == "Isolated"
    pattern, matches = step["pattern"], (step["behavior"], step["invert"])
    if "Regex" in pattern:
        alternatives = re.split(r"\|(?![^(]*\))", pattern["Regex"])
        return matches in (("Isolated", False), ("Removed", True)) and _ALTERNATIVES.issuperset(alternatives)
    return len(pattern["String"]) == 1 and not pattern["String"].isalnum()


@dataclass(frozen=True, slots=True)
class Breaks:
    """The breaks of one tokenizer: at the end of each match of `pattern`."""

    pattern: re.Pattern[str]

    def first(self, text: str, start: int, stop: int) -> int | None:
        """Returns the first break from `start` on and before `stop`, or None."""
        # In steps, because a search holds Python's lock. Each sees what follows its last break.
        for begin in range(start, stop, _SEARCHED):
            end = min(begin + _SEARCHED + _OVERLAP, stop + 1)
            found = self.pattern.search(text, max(0, begin - 1), end)
            if found:
                return found.end() if found.end() < stop else None
        return None

    def late(self, text: str, start: int, stop: int) -> int | None:
        """Returns a break from `start` on and before `stop`, near the latter, or None."""
        step = _STEP
        while stop > start:
            lower = max(start, stop - step)
            if (found := self.first(text, lower, stop)) is not None:
                return found
            stop, step = lower, 2 * step
        return None

    def all(self, text: str) -> list[int]:
        return [found.end() for found in self.pattern.finditer(text)]


def find_breaks(tokenizer: Tokenizer) -> Breaks | None:
    """Returns the breaks of a tokenizer; None if none are certain."""
    steps = steps_of(tokenizer)
    if not steps.are_local:
        return None
    trial = _Trial(tokenizer, steps)
    # Signs at the end of tokens that take the spaces behind them end no piece.
    no_ends = {content[-1:] for token in steps.added_tokens if token.rstrip for content in token.contents}
    ends = ends_of(lambda text: normalized(tokenizer, text), trial.takes_for_mark, no_ends)
    breaks = [*_before_spaces(trial, ends), *_before_signs(trial, ends), *_behind_lines(trial, ends)]
    if not breaks:
        return None
    # Two classes are compared at each character of a text; the rest only where there may be a break.
    last = "".join([ends.letters, ends.marked, ends.marks, ends.signs, ends.newer])
    following = "".join(first for first, _ in breaks)
    patterns = "|".join(pattern for _, pattern in breaks)
    return Breaks(re.compile(f"[{last}](?=[{following}])(?:{patterns})"))


# A kind of break: a pattern that looks back at the end of a piece, and the class of what it begins with.
_Position: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Trial:
    """Tries a tokenizer with short texts, without its model."""

    tokenizer: Tokenizer
    steps: Steps

    def divides(self, end: str, separator: str, rest: str) -> bool:
        """Whether a word ends before the separator, and the rest has the words that it has alone."""
        following = f"{separator}{rest}"
        return self.words(f"{end}{following}") == self.words(end) + self.words(following)

    def words(self, text: str) -> list[str]:
        """Returns the words that the model tokenizes one by one."""
        return [word for word, _ in self._split(text)]

    def takes_for_mark(self, mark: str) -> bool:
        """Whether a mark ends words before the end of a line as other marks do."""
        return self._lengths(f"x{mark}\na") in [self._lengths(f"x{other}\na") for other in "\u0301\u093f"]

    def _lengths(self, text: str) -> list[int]:
        return [stop - start for _, (start, stop) in self._split(text)]

    def _split(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        shown, splitter = normalized(self.tokenizer, text), self.tokenizer.pre_tokenizer
        return [(shown, (0, len(shown)))] if splitter is None else splitter.pre_tokenize_str(shown)

    def spaces(self, ends: tuple[str, ...], in_tokens: str) -> str:
        """Returns the whitespace before which all `ends` are divided from what follows."""
        # A piece that loses its spaces begins with a word or sign behind them, as the pattern has it.
        rests = ("a", "1", ".") if self.steps.strip_spaces else _REST
        found = [
            space
            for space in SPACES
            if self._stays(space, f"{SPACES}{SPACE_SIGN}")
            and (
                self.steps.merge_nothing_across(self._shown(space), in_tokens)
                or all(self.divides(end, space, rest) for end in ends for rest in rests)
            )
        ]
        return "".join(found)

    def signs(self) -> str:
        """Returns the signs before which letters and digits are divided from what follows."""
        if self.steps.strip_spaces or self.steps.give_spaces:
            return ""
        found = [
            sign
            for sign in SIGNS
            if self._stays(sign, SIGNS)
            and (
                self.steps.merge_nothing_across(self._shown(sign), _LETTER_ENDS)
                or all(self.divides(letter, sign, letter) for letter in _LETTERS)
            )
        ]
        return "".join(found)

    def line_ends(self) -> list[str]:
        """Returns the ends of lines behind which a text can be split."""
        steps = self.steps
        strips = any(step["type"] == "Strip" for step in steps.normalizers)
        if strips or steps.give_spaces or any(token.concerns_lines for token in steps.added_tokens):
            return []
        return [
            line_end
            for line_end in _LINE_ENDS
            if all(
                self.words(f"{last}{line_end}{first}") == self.words(f"{last}{line_end}") + self.words(first)
                for last in (*_LETTERS, *_MARKED, *_SIGNS)
                for first in ("b", "B", "1", ".", "<", "\u4e00")
            )
        ]

    def _stays(self, separator: str, others: str) -> bool:
        """Whether a separator stays one character of its kind, and no added token reaches it."""
        shown = self._shown(separator)
        if len(shown) != 1 or shown not in others:
            return False
        if (self.steps.strip_spaces or self.steps.give_spaces) and shown != " ":
            return False
        reached = re.escape(separator + shown)
        return not any(
            token.spans(reached) or token.looks_across(separator, shown) for token in self.steps.added_tokens
        )

    def _shown(self, separator: str) -> str:
        return normalized(self.tokenizer, f"a{separator}a")[1:-1]


def _before_spaces(trial: _Trial, ends: Ends) -> list[_Position]:
    """Breaks before whitespace. A space at the end of a text stays with the last word."""
    behind = _behind(ends)
    spaces = {
        "letters": trial.spaces(_LETTERS, _LETTER_ENDS),
        "marks": trial.spaces(_MARKED, _ANY_ENDS),
        "signs": trial.spaces(_SIGNS, _ANY_ENDS),
    }
    spaces["newer"] = "".join(space for space in spaces["letters"] if space in spaces["signs"])
    return [
        (
            as_class(found),
            f"(?=[{as_class(found)}](?s:.)){behind[name]}{_after_lost_spaces(trial, found, ends)}",
        )
        for name, found in spaces.items()
        if found and name in behind
    ]


def _after_lost_spaces(trial: _Trial, spaces: str, ends: Ends) -> str:
    """Returns what must follow lost spaces that come back: a word or sign, but no added token."""
    if not trial.steps.strip_spaces:
        return ""
    # Whether a run of these spaces counts as one.
    pairs = product(spaces, repeat=2)
    run = "+" if all(trial.divides("a", first, f"{second}a") for first, second in pairs) else ""
    contents = [content for token in trial.steps.added_tokens for content in token.contents]
    starts = as_class(sorted({content[0] for content in contents if content}))
    no_token = f"(?![{starts}])" if starts else ""
    return f"(?=[{as_class(spaces)}]{run}{no_token}[{ends.letters}{ends.newer}{ends.signs}])"


def _before_signs(trial: _Trial, ends: Ends) -> list[_Position]:
    """Breaks between a letter and a sign; with BERT, also before ideographs."""
    signs = as_class(trial.signs()) + (IDEOGRAPHS if trial.steps.set_ideographs_apart else "")
    if not (signs and ends.letters):
        return []
    return [(signs, f"(?=[{signs}]{_visible(ends)})(?<=[{ends.letters}])")]


def _behind_lines(trial: _Trial, ends: Ends) -> list[_Position]:
    line_ends, behind = "|".join(trial.line_ends()), "|".join(_behind(ends).values())
    splits = [step["pattern"].get("Regex", "") for step in trial.steps.pre_tokenizers if "pattern" in step]
    # Line ends and slashes may match together.
    no_slash = "(?!/)" if any("/" in split for split in splits) else ""
    if not (line_ends and behind):
        return []
    return [("\n\r", f"(?=[\n\r])(?:{behind})(?:{line_ends})(?={no_slash}{_visible(ends)})")]


def _behind(ends: Ends) -> dict[str, str]:
    """Returns patterns that look back at each class of ends."""
    patterns = {}
    letters = ends.letters + ends.marked + ends.newer
    if ends.letters:
        patterns["letters"] = f"(?<=[{ends.letters}])"
    if letters and ends.marks:
        marked = [f"(?<=[{letters}][{ends.marks}]{{{count}}})" for count in range(1, _MOST_MARKS + 1)]
        marked += [f"(?<=[{ends.marked}])"] if ends.marked else []
        patterns["marks"] = f"(?:{'|'.join(marked)})"
    if ends.signs:
        patterns["signs"] = f"(?<=[{ends.signs}])"
    if ends.newer:
        patterns["newer"] = f"(?<=[{ends.newer}])"
    return patterns


def _visible(ends: Ends) -> str:
    return f"[!-~{CHINESE_SIGNS}{ends.letters}]"


log = logging.getLogger(__name__)

# The most characters that are tokenized in one go where nothing splits them: within a second or so, and about
# 150 bytes of memory for each byte.
LONGEST_PIECE = 1_048_576

# Split at every break and compared with the whole, with some of the tokenizer's added tokens behind it.
_SAMPLE = (
    'The quick brown fox, 3.14 of 1,000,000: "it\'s" (so-called) e-mail a@b.c/d?e=f#g; x{y}[z]|~w!\n'
    "don't  two  spaces \n\n lines\nand\ttabs .punctuation ,\n,begins A.B.C.\n"
    "café e\u0301te\u0301 \u00a0\ufb01n\u3000.漢字かな、カナ。中文，标点！ "
    "\U0001f600 \U0001f468\u200d\U0001f469 1\ufe0f\u20e3 a\u200bb \u2581c "
    # Marks at the ends of words, joiners, and what is written in several ways.
    "новый, νέα ΣΑΣ. 한국어 \u1112\u1161\u11ab עִבְרִית العَرَبِيَّةُ فارسی می\u200cخواهم اردو \ufe8d\ufedf "
    "हिन्दी भाषा क् தமிழ் மொழி বাংলা ভাষা తెలుగు ಭಾಷೆ മലയാളം ગુજરાતી ਪੰਜਾਬੀ සිංහල "
    "ภาษา น้ำ ພາສາ ខ្មែរ ဘာသာ མིན། འདི། አማርኛ ቋንቋ ქართული ենա Հայերեն "
    "tiếng Việt tie\u0302\u0301ng Vie\u0323\u0302t "
    # Separators behind letters, marks and signs.
    "a\r\nb.\r\nक\u093f\r\nd\r\n\r\ne.\r\n\r\nf\n\ng.\n\nh\t\ti.\tj\u00a0k.\u3000l\u3000\u3000क\u093f\u2003m "
    "1, 2, 3 — — — A. B. C.  D.  e\u0301\u0323  f  ! ? ...\n/g.\n/h\r\r i\u2028j "
)
_ADDED_TOKENS = 64


def remembered_breaks(tokenizer: Tokenizer, description: str) -> Breaks | None:
    """Returns `proven_breaks` from the user's cache folder, proven again: finding takes half a second."""
    depends_on = [*versions_of(("tokenizers",)), sys.version, unicodedata.unidata_version, own_sources()]
    name = hashlib.sha256(f"{depends_on} {description}".encode()).hexdigest() + ".breaks"
    kept = read_kept(name)
    if kept is not None:
        try:
            breaks = Breaks(re.compile(kept.decode("utf-8", "surrogatepass")))
        except (ValueError, re.error) as error:
            log.debug("breaks of an earlier start cannot be read: %s", error)
        else:
            if _are_proven(breaks, tokenizer):
                return breaks
    found = proven_breaks(tokenizer)
    if found is not None:
        keep(name, found.pattern.pattern.encode("utf-8", "surrogatepass"))
    return found


def proven_breaks(tokenizer: Tokenizer) -> Breaks | None:
    """Returns a tokenizer's breaks; None if texts are read whole."""
    breaks = find_breaks(tokenizer)
    if breaks is None:
        log.info(
            "this tokenizer's steps do not tell where texts can be split: it reads them whole, and refuses "
            "those of more than %d characters",
            LONGEST_PIECE,
        )
        return None
    if _are_proven(breaks, tokenizer):
        return breaks
    log.warning(
        "this tokenizer cannot split texts safely: it reads them whole, and refuses those of more "
        "than %d characters",
        LONGEST_PIECE,
    )
    return None


def _are_proven(breaks: Breaks, tokenizer: Tokenizer) -> bool:
    """Whether the pieces of a sample, split at every break, have the tokens of the whole."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:_ADDED_TOKENS]
    sample = _SAMPLE + " ".join(f"a{token}b {token} c, {token}.d" for token in added)
    ends = [*breaks.all(sample), len(sample)]
    texts = [sample, *(sample[start:stop] for start, stop in pairwise([0, *ends]))]
    # One by one: a batch would start the library's threads with the priority of this one.
    whole, *pieces = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return bool(whole == [token for piece in pieces for token in piece])
