"""The steps of a tokenizer, from its own description: normalizers, pre-tokenizers, added tokens and model.
Only the steps on the lists below are known to treat both sides of a break apart as they treat them together.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from maxsimd.engine.processors.text.break_characters import IDEOGRAPHS, SIGNS, SPACE_SIGN, SPACES, kind_of

# Normalizers that look no further than a grapheme cluster, or a letter and its marks. A break is at the end
# of both, and no separator changes with what stands before it. Nor does what matches these patterns, which
# begins with a space.
_LOCAL_NORMALIZERS = {
    *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Strip"),
    "StripAccents",
}
_REPLACED = {r" {2,}", r"\s+"}
# What a BPE model may do to a text that is not split, beside merging what stands side by side.
_MORE_THAN_MERGES = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
# Pre-tokenizers that split by the class of each character, and those that do so within a word, at the end.
_BY_CLASS = {"BertPreTokenizer", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
_LAST = {"ByteLevel", "Metaspace"}
# Alternatives of the patterns by which byte-level tokenizers split. None matches a letter or digit with a
# separator behind it, or anything with a space behind it but the end of a line. None looks further than to
# the end of a run of whitespace, and none looks back. So a word ends at each break, and the words on either
# side do not depend on the other.
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
class AddedToken:
    """A token that is found in texts before they are split, as it is written or as it is normalized."""

    contents: set[str]
    lstrip: bool
    rstrip: bool
    single_word: bool

    def spans(self, separators: str) -> bool:
        """Whether it can lie across a break before one of the separators, a class of characters."""
        return any(re.search(rf"\S[{separators}]", content) for content in self.contents)

    def looks_across(self, separator: str, shown: str) -> bool:
        """Whether it depends on the other side of a break before a separator, `shown` when normalized. One
        that takes the spaces behind it and ends with a sign does not: that sign ends no piece."""
        return any(
            (self.single_word and content[:1] in (separator, shown))
            or (self.rstrip and separator in SPACES and kind_of(content[-1:] or " ") != "sign")
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
class Steps:
    """The steps of a tokenizer. `merged` are the tokens of a model that makes them by merges alone,
    each between zeros, and "" for other models."""

    normalizers: list[dict[str, Any]]
    pre_tokenizers: list[dict[str, Any]]
    added_tokens: list[AddedToken]
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
        """Whether a piece loses the spaces that it begins with."""
        return any(step["type"] == "Strip" and step["strip_left"] for step in self.normalizers)

    @property
    def set_ideographs_apart(self) -> bool:
        """Whether each Chinese character is a word, as BERT has it."""
        return (
            any(
                step["type"] == "BertNormalizer" and step["handle_chinese_chars"] for step in self.normalizers
            )
            and [step["type"] for step in self.pre_tokenizers] == ["BertPreTokenizer"]
            and not any(token.spans(IDEOGRAPHS) for token in self.added_tokens)
        )

    @property
    def leave_lines_alone(self) -> bool:
        """Whether nothing happens to the end of a line that depends on whether the text ends there."""
        return not (
            self.give_spaces
            or any(step["type"] == "Strip" for step in self.normalizers)
            or any(token.concerns_lines for token in self.added_tokens)
        )

    @property
    def join_slashes_to_lines(self) -> bool:
        """Whether line ends and slashes may be one match of a pattern."""
        return any(
            "/" in step["pattern"].get("Regex", "") for step in self.pre_tokenizers if "pattern" in step
        )

    @property
    def give_spaces(self) -> bool:
        """Whether a piece that does not begin with a space may be given one."""
        end = self._end
        return end["type"] == "Metaspace" or (end["type"] == "ByteLevel" and bool(end["add_prefix_space"]))

    @property
    def no_ends(self) -> set[str]:
        """Signs at the end of tokens that take the spaces behind them."""
        return {content[-1:] for token in self.added_tokens if token.rstrip for content in token.contents}

    @property
    def token_starts(self) -> set[str]:
        """The characters that added tokens begin with."""
        return {content[0] for token in self.added_tokens for content in token.contents if content}

    def merge_nothing_across(self, separator: str, ends: str) -> bool:
        """Whether text that is not split has no token in which the separator follows one of `ends`, a class
        of characters that holds all that pieces end with, and the ends of tokens for bytes or for what is
        unknown."""
        if self._end["type"] in _LAST or f"\0{separator}\0" not in self.merged:
            return False
        return re.search(f"[{ends}]{re.escape(separator)}", self.merged) is None

    @property
    def _end(self) -> dict[str, Any]:
        return self.pre_tokenizers[-1] if self.pre_tokenizers else {"type": None}

    @property
    def _give_spaces_back(self) -> bool:
        """Whether each piece that begins with a word or sign begins with a space in the end, and no added
        token is a word or begins with a space that is lost."""
        always = self._end["type"] == "Metaspace" and self._end["prepend_scheme"] == "always"
        return always and not any(
            re.match(r"[\w\s]", text) for token in self.added_tokens for text in token.contents
        )


def steps_of(tokenizer: Tokenizer) -> Steps:
    """Reads the steps of a tokenizer from its description."""
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
    """A text as a tokenizer's normalizer leaves it."""
    return text if tokenizer.normalizer is None else str(tokenizer.normalizer.normalize_str(text))


def _in_order(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a component, those of sequences within sequences laid out."""
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
    # What takes the place of more than one character must be seen where these end a piece. What takes the
    # place of one is tried for each.
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
