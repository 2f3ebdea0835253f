"""How many arrays, objects, strings and commas a JSON text has, counted without building any of them.

What takes two or three bytes of a body, an empty object, a short string or a number, takes ten times as much
memory, and Python builds millions of them with its lock held. So they are counted first, with numpy, which
lets other threads run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# This many bytes are looked at at a time.
_BLOCK = 1 << 18
_QUOTE, _BACKSLASH, _COMMA, _ARRAY, _OBJECT = (ord(character) for character in '"\\,[{')
# Bytes of memory that each takes as one of Python's objects, at most and about: a string also as the name of
# a field, and behind each comma stands a value.
_CONTAINER_BYTES, _STRING_BYTES, _COMMA_BYTES = 80, 80, 40


@dataclass(frozen=True, slots=True)
class JsonShape:
    """How many arrays and objects there are (`containers`), strings, names of fields included, and commas
    between values."""

    containers: int
    strings: int
    commas: int

    @property
    def memory(self) -> int:
        """About how many bytes of memory that takes, beside the characters of its strings."""
        return self.containers * _CONTAINER_BYTES + self.strings * _STRING_BYTES + self.commas * _COMMA_BYTES

    def is_within(self, most: "JsonShape") -> bool:
        return (
            self.containers <= most.containers and self.strings <= most.strings and self.commas <= most.commas
        )


def shape_of(body: bytes | bytearray, most: JsonShape) -> JsonShape:
    """The shape of a JSON text. What its strings say is counted too, where even so it is within `most` and
    takes no more memory than the body does. Of bytes that are no JSON it says anything."""
    shape = _shape_with_strings(body)
    return shape if shape.is_within(most) and shape.memory <= len(body) else _shape_without_strings(body)


def _shape_with_strings(body: bytes | bytearray) -> JsonShape:
    """Counts every character that could be of the text's structure."""
    view = memoryview(body)
    containers = quotes = commas = 0
    for start in range(0, len(body), _BLOCK):
        block = np.frombuffer(view[start : start + _BLOCK], dtype=np.uint8)
        containers += _count(block, _ARRAY) + _count(block, _OBJECT)
        quotes += _count(block, _QUOTE)
        commas += _count(block, _COMMA)
    return JsonShape(containers, (quotes + 1) // 2, commas)


def _shape_without_strings(body: bytes | bytearray) -> JsonShape:
    containers = quotes = commas = 0
    for block in _blocks(body):
        is_counted = (block == _QUOTE) | (block == _COMMA) | (block == _ARRAY) | (block == _OBJECT)
        counted = block[is_counted]
        is_quote = counted == _QUOTE
        # Between the first quote of a string and its last, their number is odd.
        is_inside = np.logical_xor.accumulate(np.concatenate(([quotes % 2 == 1], is_quote)))[1:]
        outside = counted[~is_inside]
        containers += _count(outside, _ARRAY) + _count(outside, _OBJECT)
        commas += _count(outside, _COMMA)
        quotes += int(np.count_nonzero(is_quote))
    return JsonShape(containers, (quotes + 1) // 2, commas)


def _blocks(body: bytes | bytearray) -> Iterator[NDArray[np.uint8]]:
    """The text in parts, without the quotes that are escaped."""
    view = memoryview(body)
    for start, stop in pairwise(_ends_of_blocks(view)):
        part = bytes(view[start:stop])
        if _BACKSLASH in part:
            part = part.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        yield np.frombuffer(part, dtype=np.uint8)


def _ends_of_blocks(body: memoryview) -> Iterator[int]:
    """Where a block ends and the next begins: no backslash is cut off from what it escapes."""
    stop = 0
    yield stop
    while stop < len(body):
        stop = min(stop + _BLOCK, len(body))
        while stop < len(body) and body[stop - 1] == _BACKSLASH:
            stop += 1
        yield stop


def _count(block: NDArray[np.uint8], character: int) -> int:
    return int(np.count_nonzero(block == character))
