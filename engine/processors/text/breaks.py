"""Breaks: where a text can be split so that its pieces, tokenized one by one, have the tokens of the whole.

Derived from the tokenizer's own description: `break_steps.py` says which steps treat both sides of a break
apart as they treat them together. A tokenizer that has anything else gets no breaks.

A break is in one of three positions:
- Before whitespace that follows a letter, a letter with marks, or a sign. No normal form joins whitespace to
  what stands before it, a grapheme cluster ends there, and no word goes on there; only to a mark or sign do
  some patterns join the end of a line. A run of whitespace stays whole: a piece begins with it.
- Between a letter or digit and a sign.
- Between the end of a line and something visible.
Which whitespace, signs and line ends these are is tried with the tokenizer.
"""

import re
from dataclasses import dataclass
from itertools import product

from tokenizers import Tokenizer

from maxsimd.engine.processors.text.break_characters import (
    CHINESE_SIGNS,
    IDEOGRAPHS,
    SIGNS,
    SPACE_SIGN,
    SPACES,
    Ends,
    as_class,
    ends_of,
)
from maxsimd.engine.processors.text.break_steps import Steps, normalized, steps_of

# Marks of one letter that are looked back over, at most.
_MOST_MARKS = 5
_LINE_ENDS = ("\r\n\r\n", "\n\n", "\r\n", "\n")
# Of what each class of ends holds, some of every kind that a pattern may tell apart.
_LETTERS = ("a", "A", "1", "\u3042", "\u4e00")
_MARKED = ("e\u0301", "x\u0301", "\u0939\u093f", "\u0e17\u0e34", "\u05d0\u05b8")
_SIGNS = (".", ",", "!", "-", "_", "'", '"', ")", "+", "\u2014", "\u3002", "\u0964", "\u20ac")
# What these are at the end of a token: letters, bytes and what is unknown; or anything but spaces.
_LETTER_ENDS, _ANY_ENDS = r"\w>\]", rf"^\0\s{SPACE_SIGN}"
# And of what may follow whitespace.
_REST = ("a", "1", ".", "\u4e00", " a", "  a", "\n", "\n\na", "\r\n.", "\ta", "")


@dataclass(frozen=True, slots=True)
class Breaks:
    """The breaks of one tokenizer: at the end of each match of `pattern`."""

    pattern: re.Pattern[str]

    def first(self, text: str, start: int, stop: int) -> int | None:
        """The first break from `start` on and before `stop`; None if there is none."""
        found = self.pattern.search(text, max(0, start - 1), stop + 1)
        return found.end() if found and found.end() < stop else None

    def all(self, text: str) -> list[int]:
        """All breaks of a text."""
        return [found.end() for found in self.pattern.finditer(text)]


def find_breaks(tokenizer: Tokenizer) -> Breaks | None:
    """The breaks of a tokenizer; None where none are certain."""
    steps = steps_of(tokenizer)
    if not steps.are_local:
        return None
    trial = _Trial(tokenizer, steps)
    ends = ends_of(lambda text: normalized(tokenizer, text), trial.takes_for_mark, steps.no_ends)
    breaks = [*_before_spaces(trial, ends), *_before_signs(trial, ends), *_behind_lines(trial, ends)]
    if not breaks:
        return None
    # Two classes are compared at each character of a text; the rest only where there may be a break.
    last = "".join([ends.letters, ends.marked, ends.marks, ends.signs, ends.newer])
    following = "".join(position.following for position in breaks)
    patterns = "|".join(position.pattern for position in breaks)
    return Breaks(re.compile(f"[{last}](?=[{following}])(?:{patterns})"))


@dataclass(frozen=True, slots=True)
class _Position:
    """A kind of position of breaks: a pattern that is compared behind a character that a piece can end with,
    looks back at it, and moves on to the break. `following` is the class of what it begins with."""

    following: str
    pattern: str


@dataclass(frozen=True, slots=True)
class _Trial:
    """Tries a tokenizer with short texts, as far as its model is not needed."""

    tokenizer: Tokenizer
    steps: Steps

    def divides(self, end: str, separator: str, rest: str) -> bool:
        """Whether a word ends before the separator, and what follows has the words that it has alone."""
        following = f"{separator}{rest}"
        return self.words(f"{end}{following}") == self.words(end) + self.words(following)

    def words(self, text: str) -> list[str]:
        """Returns the words that the model tokenizes, each by itself."""
        shown = normalized(self.tokenizer, text)
        if self.tokenizer.pre_tokenizer is None:
            return [shown]
        return [word for word, _ in self.tokenizer.pre_tokenizer.pre_tokenize_str(shown)]

    def takes_for_mark(self, mark: str) -> bool:
        """Whether a mark is one to the tokenizer too: it ends words before a line's end as others do."""
        return self._lengths(f"x{mark}\na") in [self._lengths(f"x{other}\na") for other in "\u0301\u093f"]

    def _lengths(self, text: str) -> list[int]:
        shown = normalized(self.tokenizer, text)
        if self.tokenizer.pre_tokenizer is None:
            return [len(shown)]
        return [stop - start for _, (start, stop) in self.tokenizer.pre_tokenizer.pre_tokenize_str(shown)]

    def spaces(self, ends: tuple[str, ...], in_tokens: str) -> str:
        """The whitespace before which all of the ends, in tokens a class of characters, are divided from
        whatever follows."""
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

    def collapses(self, spaces: str) -> bool:
        """Whether a run of these spaces counts as one."""
        return all(self.divides("a", first, f"{second}a") for first, second in product(spaces, repeat=2))

    def signs(self) -> str:
        """The signs before which letters and digits are divided from what follows."""
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
        """The ends of lines behind which a text can be cut."""
        if not self.steps.leave_lines_alone:
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
        """Whether a separator is one character of its kind when normalized, and no added token reaches it."""
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
    """The breaks before whitespace, by what they look back at. A space at the end of a text stays with the
    last word."""
    behind = _behind(ends)
    spaces = {
        "letters": trial.spaces(_LETTERS, _LETTER_ENDS),
        "marks": trial.spaces(_MARKED, _ANY_ENDS),
        "signs": trial.spaces(_SIGNS, _ANY_ENDS),
    }
    spaces["newer"] = "".join(space for space in spaces["letters"] if space in spaces["signs"])
    return [
        _Position(
            as_class(found),
            f"(?=[{as_class(found)}](?s:.)){behind[name]}{_after_lost_spaces(trial, found, ends)}",
        )
        for name, found in spaces.items()
        if found and name in behind
    ]


def _after_lost_spaces(trial: _Trial, spaces: str, ends: Ends) -> str:
    """The pattern of what must follow a break where a piece loses its spaces and gets one back: a word or
    sign, but not the beginning of an added token."""
    if not trial.steps.strip_spaces:
        return ""
    run = "+" if trial.collapses(spaces) else ""
    starts = as_class(sorted(trial.steps.token_starts))
    no_token = f"(?![{starts}])" if starts else ""
    return f"(?=[{as_class(spaces)}]{run}{no_token}[{ends.letters}{ends.newer}{ends.signs}])"


def _before_signs(trial: _Trial, ends: Ends) -> list[_Position]:
    """The breaks between a letter and a sign; with BERT, also before ideographs."""
    signs = as_class(trial.signs()) + (IDEOGRAPHS if trial.steps.set_ideographs_apart else "")
    if not (signs and ends.letters):
        return []
    return [_Position(signs, f"(?=[{signs}]{_visible(ends)})(?<=[{ends.letters}])")]


def _behind_lines(trial: _Trial, ends: Ends) -> list[_Position]:
    """The breaks between the end of a line and the next line."""
    line_ends, behind = "|".join(trial.line_ends()), "|".join(_behind(ends).values())
    no_slash = "(?!/)" if trial.steps.join_slashes_to_lines else ""
    if not (line_ends and behind):
        return []
    return [_Position("\n\r", f"(?=[\n\r])(?:{behind})(?:{line_ends})(?={no_slash}{_visible(ends)})")]


def _behind(ends: Ends) -> dict[str, str]:
    """Patterns that look back at an end of each class that has any."""
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
