"""Classes of characters by which breaks are found: what a piece can end with, and what can divide words.

Libraries know Unicode in different versions. Only those letters, digits and signs count as such that are in
Unicode 3.2 of 2002 and in Python's version: every library has them in the same class. Newer letters count as
what may be letters or signs. All stand in the first plane, where most scripts in use today are.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["letter", "mark", "sign"]

# How many characters are normalized in one call, and what stands between them.
_AT_ONCE, _BETWEEN = 1024, " x "
# What Unicode calls whitespace.
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
# Letters that are part of a cluster with what stands before them, as a mark is: vowels of Thai and Lao, and
# voiced sound marks. Then those that versions of Unicode joined with what stands behind them: vowels of Thai
# and Lao that are written before their consonants, and a letter of Malayalam.
_JOINED = {
    "\u0d4e",
    "\u0e33",
    "\u0eb3",
    "\uff9e",
    "\uff9f",
    *map(chr, [*range(0xE40, 0xE45), *range(0xEC0, 0xEC5)]),
}


@dataclass(frozen=True, slots=True)
class Ends:
    """The characters that a piece can end with, each a class of characters of a pattern, by what it is when
    normalized: `letters` and digits, `marked` letters, which become a letter and a mark, the `marks` that may
    stand behind either, `signs`, which are punctuation and symbols, and `newer` letters."""

    letters: str
    marked: str
    marks: str
    signs: str
    newer: str


@functools.cache
def kind_of(character: str) -> Kind | None:
    """The kind of a character; None where libraries may differ, and for what is not seen."""
    now = _KINDS.get(unicodedata.category(character))
    then = _KINDS.get(unicodedata.ucd_3_2_0.category(character))
    return now if now == then and character not in _JOINED and character != SPACE_SIGN else None


def ends_of(normalize: Callable[[str], str], is_mark: Callable[[str], bool], no_ends: set[str]) -> Ends:
    """Finds what the pieces of a tokenizer can end with. `is_mark` says whether the tokenizer takes a mark
    for one that newer versions of Unicode have. Nothing ends a piece that has one of `no_ends` at its end."""
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
    """Writes characters, in their order, as they stand between the brackets of a pattern."""
    ranges: list[list[int]] = []
    for code in map(ord, characters):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join("-".join(re.escape(chr(code)) for code in dict.fromkeys(each)) for each in ranges)


@functools.cache
def _characters() -> dict[Kind | Literal["newer"], str]:
    """The characters of each kind, marks that only Python's version of Unicode has, and such letters."""
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
    """Each character, and as it is normalized; BERT sets spaces around ideographs."""
    for character, shown in zip(characters, _normalized_each(normalize, characters), strict=True):
        yield character, character if shown.strip() == character else shown


def _normalized_each(normalize: Callable[[str], str], texts: Sequence[str]) -> list[str]:
    """Each text, which has no spaces, as it is normalized by itself. Many are normalized in one call, as the
    words of a text; fewer where the normalizer changes what stands between them."""
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
    """Whether a normalized text has characters, all of them such that one sees them or their marks."""
    return bool(shown) and all(
        kind_of(character) is not None or unicodedata.category(character)[0] == "M" for character in shown
    )
