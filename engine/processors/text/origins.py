"""Which characters of a text the tokens of its sequence stand for."""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.explanations import Span
from maxsimd.scheduler.sequence import TokenIds

# First character and one after the last of each token, int32 [tokens, 2].
Spans = NDArray[np.int32]
# In place of the span of a token that stands for no characters.
_NONE = -1
# One visible character hardly has more code points than this.
_LONGEST_CLUSTER = 16
_JOINER = "\u200d"
# Korean letters, and those of them that do not begin a syllable.
_JAMO, _VOWELS_AND_ENDS = ("\u1100", "\u11ff"), ("\u1160", "\u11ff")
_SKIN_TONES = "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"


@dataclass(frozen=True, slots=True, eq=False)
class Origins:
    """The tokens of a sequence, of those that are pooled if not all: their ids [rows], and their spans in the
    text [rows, 2], -1 for those that are not the text's: special tokens, prompt, expansion."""

    ids: TokenIds
    spans: Spans

    @property
    def extent(self) -> Span | None:
        """The characters from the first to the last that any of the tokens stands for."""
        return extent(self.spans)

    @classmethod
    def join(cls, parts: Iterable["Origins"]) -> "Origins":
        """The tokens of several sequences, one after the other."""
        ids, spans = zip(*((part.ids, part.spans) for part in parts), strict=True)
        return cls(np.concatenate(ids), np.concatenate(spans))

    def span(self, row: int, text: str) -> Span | None:
        """The characters of `text` that a token stands for, as people count them: without the spaces around
        them that tokenizers count to the token, and with the accents and joiners of the first and the last,
        for which there may be tokens of their own."""
        start, stop = map(int, self.spans[row])
        if start < 0:
            return None
        found = text[start:stop]
        inside = found.strip()
        if inside:
            start += len(found) - len(found.lstrip())
            stop = start + len(inside)
        for _ in range(_LONGEST_CLUSTER):
            if 0 < start < len(text) and _belong_together(text[start - 1], text[start]):
                start -= 1
            if 0 < stop < len(text) and _belong_together(text[stop - 1], text[stop]):
                stop += 1
        return start, stop


def _belong_together(first: str, second: str) -> bool:
    """Whether a reader sees two characters as one: an accent or vowel sign and what it stands on, letters of
    a Korean syllable, or parts of an emoji."""
    is_mark = unicodedata.category(second).startswith("M") and not first.isspace()
    is_syllable = _is_between(first, _JAMO) and _is_between(second, _VOWELS_AND_ENDS)
    return is_mark or is_syllable or _JOINER in (first, second) or second in _SKIN_TONES


def _is_between(character: str, bounds: tuple[str, str]) -> bool:
    return bounds[0] <= character <= bounds[1]


def extent(spans: Spans) -> Span | None:
    """Returns the characters from the first of the spans to the last; None if no span has any."""
    there = spans[spans[:, 0] != _NONE]
    return (int(there[:, 0].min()), int(there[:, 1].max())) if len(there) else None


def around(spans: Spans, before: int, length: int) -> Spans:
    """The spans of a text's tokens within a sequence of `length` tokens, of which `before` stand before
    them."""
    placed = np.full((length, 2), _NONE, dtype=np.int32)
    placed[before : before + len(spans)] = spans
    return placed


def behind_prompt(spans: Spans, characters: int) -> Spans:
    """Converts spans in a text behind a prompt of that many `characters` to spans in the text itself."""
    moved = np.maximum(spans - characters, 0)
    moved[spans[:, 1] <= characters] = _NONE
    return moved
