"""Breaks: where a text can be cut so that its pieces, tokenised one by one, have the tokens of the whole.

Derived from the tokeniser's own description: only what is on the lists below is known to treat both sides of
a break apart as it treats them together. A tokeniser that has anything else gets no breaks.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

# A break is between a letter or digit and a separator that a visible character follows. These are letters and
# digits of the common scripts: they end what they stand in, in normal forms and in grapheme clusters.
_LETTERS = (
    *((0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A)),
    *((0xC0, 0xD6), (0xD8, 0xF6), (0xF8, 0x24F)),  # Latin
    *((0x391, 0x3A1), (0x3A3, 0x3CE), (0x400, 0x481), (0x48A, 0x52F)),  # Greek and Cyrillic
    *((0x5D0, 0x5EA), (0x621, 0x63A), (0x641, 0x64A)),  # Hebrew and Arabic
    *((0x905, 0x939), (0xE01, 0xE30)),  # Devanagari and Thai
    *((0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3)),  # kana, Han and Hangul
)
_IDEOGRAPHS = "\u4e00-\u9fa5"
_SPACES = " \n"
_CHINESE_MARKS = "\u3001\u3002\u300c\u300d\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
_MARKS = '"#$%&()*+,-./:;?@[]{}!|~' + _CHINESE_MARKS
_VISIBLE = "!-~" + _CHINESE_MARKS

# Normalisers that look no further than a grapheme cluster, or a letter and its marks. A break is at the end
# of both, and no separator changes with what stands before it. Nor does what matches these patterns.
_LOCAL_NORMALIZERS = {
    *(
        "BertNormalizer",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Strip",
        "StripAccents",
    ),
}
_REPLACED = {r" {2,}", r"\s+"}
# What a BPE model may do to a text that is not split, beside merging what stands side by side.
_MORE_THAN_MERGES = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
# Pre-tokenisers that split by the class of each character, and those that do so within a word, at the end.
_BY_CLASS = {"BertPreTokenizer", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
_LAST = {"ByteLevel", "Metaspace"}
# Alternatives of the patterns by which byte-level tokenisers split. None matches a letter or digit with a
# separator behind it, and none looks further than to the end of a run of whitespace. So a word ends at each
# break, and the words on either side do not depend on the other.
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


@dataclass(frozen=True, slots=True)
class Breaks:
    """The breaks of one tokeniser: behind each match of `pattern`, which looks two characters ahead."""

    pattern: re.Pattern[str]

    def first(self, text: str, start: int, stop: int) -> int | None:
        """The first break from `start` on and before `stop`; None if there is none."""
        found = self.pattern.search(text, max(0, start - 1), stop + 1)
        return found.end() if found else None

    def all(self, text: str) -> list[int]:
        """All breaks of a text."""
        return [found.end() for found in self.pattern.finditer(text)]


def find_breaks(tokenizer: Tokenizer) -> Breaks | None:
    """The breaks of a tokeniser; None where none are certain."""
    steps = _steps_of(tokenizer)
    if not steps.are_local:
        return None
    behind = "".join(re.escape(mark) for mark in _SPACES + _MARKS if _is_separator(tokenizer, steps, mark))
    if steps.set_ideographs_apart:
        behind += _IDEOGRAPHS
    letters = _letters(tokenizer)
    if not behind or not letters:
        return None
    # Only a word gets the space back that a piece begins with and loses.
    visible = letters if steps.strip_spaces else _VISIBLE + letters
    breaks = f"[{letters}](?=[{behind}][{visible}])"
    if steps.leave_lines_alone and _lines_are_apart(tokenizer):
        breaks += f"|[{visible}]\n(?=[{visible}])"
    return Breaks(re.compile(breaks))


@dataclass(frozen=True, slots=True)
class _AddedToken:
    """A token that is found in texts before they are split, as it is written or as it is normalised."""

    contents: set[str]
    lstrip: bool
    rstrip: bool
    single_word: bool

    def spans(self, marks: str) -> bool:
        """Whether it can lie across a break before one of the marks, a class of characters."""
        return any(re.search(rf"\w[{marks}]", content) for content in self.contents)

    def looks_across(self, mark: str, shown: str) -> bool:
        """Whether it depends on the other side of a break before a mark, which is `shown` when normalised."""
        return any(
            (self.single_word and content[:1] in (mark, shown))
            or (self.rstrip and mark in _SPACES and re.search(r"\w$", content))
            for content in self.contents
        )

    @property
    def concerns_lines(self) -> bool:
        """Whether it can lie across the end of a line, takes it away, or depends on what lies behind it."""
        return self.lstrip or any(
            re.search(r"\s\S", content) or (self.single_word and content[-1:].isspace())
            for content in self.contents
        )


@dataclass(frozen=True, slots=True)
class _Steps:
    """What a tokeniser does with a text. `merged` are the tokens of a model that makes them by merges alone,
    each between zeros, and "" for other models."""

    normalizers: list[dict[str, Any]]
    pre_tokenizers: list[dict[str, Any]]
    added_tokens: list[_AddedToken]
    merged: str

    @property
    def are_local(self) -> bool:
        """Whether what happens on one side of a break has nothing to do with the other."""
        if self.strip_spaces and not self._give_spaces_back:
            return False
        last = len(self.pre_tokenizers) - 1
        return all(map(_is_local_normalizer, self.normalizers)) and all(
            _is_local_split(step) or (i == last and step["type"] in _LAST)
            for i, step in enumerate(self.pre_tokenizers)
        )

    @property
    def strip_spaces(self) -> bool:
        """Whether a piece loses the space that it begins with."""
        return any(step["type"] == "Strip" and step["strip_left"] for step in self.normalizers)

    @property
    def set_ideographs_apart(self) -> bool:
        """Whether each Chinese character is a word, as BERT has it."""
        return (
            any(
                step["type"] == "BertNormalizer" and step["handle_chinese_chars"] for step in self.normalizers
            )
            and [step["type"] for step in self.pre_tokenizers] == ["BertPreTokenizer"]
            and not any(token.spans(_IDEOGRAPHS) for token in self.added_tokens)
        )

    @property
    def leave_lines_alone(self) -> bool:
        """Whether nothing happens to the end of a line that depends on whether the text ends there."""
        return not (
            self.give_spaces
            or any(step["type"] == "Strip" for step in self.normalizers)
            # Line ends and slashes may be one match of a pattern.
            or any(
                "/" in step["pattern"].get("Regex", "") for step in self.pre_tokenizers if "pattern" in step
            )
            or any(token.concerns_lines for token in self.added_tokens)
        )

    @property
    def give_spaces(self) -> bool:
        """Whether a piece that does not begin with a space may be given one."""
        end = self._end
        return end["type"] == "Metaspace" or (end["type"] == "ByteLevel" and bool(end["add_prefix_space"]))

    def merge_nothing_across(self, mark: str) -> bool:
        """Whether text that is not split has no token in which the mark follows a letter or digit, or what
        stands for bytes or for what is unknown."""
        if self._end["type"] in _LAST or f"\0{mark}\0" not in self.merged:
            return False
        return re.search(rf"[\w>\]]{re.escape(mark)}", self.merged) is None

    @property
    def _end(self) -> dict[str, Any]:
        return self.pre_tokenizers[-1] if self.pre_tokenizers else {"type": None}

    @property
    def _give_spaces_back(self) -> bool:
        """Whether each piece that begins with a word begins with a space in the end."""
        always = self._end["type"] == "Metaspace" and self._end["prepend_scheme"] == "always"
        return always and not any(
            re.match(r"\w", text) for token in self.added_tokens for text in token.contents
        )


def _steps_of(tokenizer: Tokenizer) -> _Steps:
    description = json.loads(tokenizer.to_str())
    model = description["model"]
    is_merged = model["type"] == "BPE" and not any(map(model.get, _MORE_THAN_MERGES))
    return _Steps(
        _in_order(description["normalizer"], "normalizers"),
        _in_order(description["pre_tokenizer"], "pretokenizers"),
        [
            _AddedToken(
                {token["content"], _normalized(tokenizer, token["content"])},
                token["lstrip"],
                token["rstrip"],
                token["single_word"],
            )
            for token in description["added_tokens"]
        ],
        "\0".join(["", *model["vocab"], ""]) if is_merged else "",
    )


def _in_order(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a component, those of sequences within sequences laid out."""
    if step is None:
        return []
    return [inner for part in step[name] for inner in _in_order(part, name)] if name in step else [step]


def _is_local_normalizer(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"]
        if "Regex" in pattern:
            return pattern["Regex"] in _REPLACED
        return not set(pattern["String"][1:]) & {*_SPACES, *_MARKS, "\u2581"}
    return step["type"] in _LOCAL_NORMALIZERS


def _is_local_split(step: dict[str, Any]) -> bool:
    if step["type"] != "Split":
        return step["type"] in _BY_CLASS and step.get("behavior", "Isolated") == "Isolated"
    pattern, matches = step["pattern"], (step["behavior"], step["invert"])
    if "Regex" in pattern:
        alternatives = re.split(r"\|(?![^(]*\))", pattern["Regex"])
        return matches in (("Isolated", False), ("Removed", True)) and _ALTERNATIVES.issuperset(alternatives)
    return len(pattern["String"]) == 1 and not pattern["String"].isalnum()


def _is_separator(tokenizer: Tokenizer, steps: _Steps, mark: str) -> bool:
    """Whether each letter or digit with this mark behind it ends a word, and the mark begins the next."""
    shown = _normalized(tokenizer, f"a{mark}a")[1:-1]
    if len(shown) != 1 or shown not in f"{_SPACES}{_MARKS}\u2581":
        return False
    if any(
        token.spans(re.escape(mark + shown)) or token.looks_across(mark, shown)
        for token in steps.added_tokens
    ):
        return False
    if (steps.strip_spaces or steps.give_spaces) and not (mark in _SPACES and shown == " "):
        return False
    return steps.merge_nothing_across(shown) or all(
        _words(tokenizer, f"{letter}{mark}{letter}")
        == _words(tokenizer, letter) + _words(tokenizer, f"{mark}{letter}")
        for letter in "aA1\u3042\u4e00"
    )


def _lines_are_apart(tokenizer: Tokenizer) -> bool:
    return all(
        _words(tokenizer, f"{last}\n{first}") == _words(tokenizer, f"{last}\n") + _words(tokenizer, first)
        for last in "a1.?"
        for first in "bB1.<\u4e00"
    )


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    """What the model tokenises, each by itself."""
    normalized = _normalized(tokenizer, text)
    if tokenizer.pre_tokenizer is None:
        return [normalized]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]


def _normalized(tokenizer: Tokenizer, text: str) -> str:
    return text if tokenizer.normalizer is None else str(tokenizer.normalizer.normalize_str(text))


def _letters(tokenizer: Tokenizer) -> str:
    """The letters and digits that are such after normalisation too, as a class of characters."""
    ranges: list[list[int]] = []
    for first, last in _LETTERS:
        for letter in range(first, last + 1):
            shown = _normalized(tokenizer, chr(letter)).strip()
            if not (shown[:1].isalnum() and shown[-1:].isalnum()):
                continue
            if ranges and ranges[-1][1] == letter - 1:
                ranges[-1][1] = letter
            else:
                ranges.append([letter, letter])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
