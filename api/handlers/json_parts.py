"""JSON texts of any size, measured and decoded in parts, because each call of NumPy or msgspec holds Python's
lock until it returns."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from maxsimd.api.answer import too_deep
from maxsimd.engine.workers import yield_to_smaller

T = TypeVar("T")

BLOCK = 1 << 18
_QUOTE, _BACKSLASH, _COMMA = (ord(character) for character in '"\\,')
# How each character changes the depth of nesting.
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[[*b"[{"]], _STEPS[[*b"]}"]] = 1, -1
_IS_COUNTED = _STEPS != 0
_IS_COUNTED[[_QUOTE, _COMMA]] = True
# About how many bytes of memory Python's objects take at most. A value follows each comma.
_CONTAINER_BYTES, _STRING_BYTES, _COMMA_BYTES = 80, 80, 40
# Larger values than a block are read at so many levels.
_DEEPEST_LARGE = 12
# Values stay undecoded views of the body, which takes little time.
NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(list[msgspec.Raw])
_TEXTS, _OBJECTS_OF_TEXTS = msgspec.json.Decoder(list[str]), msgspec.json.Decoder(list[dict[str, str]])
# The slowest numbers of a text of fewer bytes take a millisecond.
_SHORT = 1024


@dataclass(frozen=True, slots=True)
class JsonShape:
    """Counts of a JSON text: arrays and objects (`containers`), strings with the names of fields, and commas
    between values."""

    containers: int
    strings: int
    commas: int

    @property
    def memory(self) -> int:
        """About how many bytes Python's objects take, without the characters of strings."""
        return self.containers * _CONTAINER_BYTES + self.strings * _STRING_BYTES + self.commas * _COMMA_BYTES

    def is_within(self, most: "JsonShape") -> bool:
        return (
            self.containers <= most.containers and self.strings <= most.strings and self.commas <= most.commas
        )


def shape_of(body: bytes | bytearray, most: JsonShape) -> JsonShape:
    """The shape of a JSON text. First counts the contents of strings too. If that is beyond `most`, or takes
    more memory than the body, counts again without them. The result means nothing for bytes that are no
    JSON."""
    shape = _shape_with_strings(body)
    return shape if shape.is_within(most) and shape.memory <= len(body) else _shape_without_strings(body)


def _shape_with_strings(body: bytes | bytearray) -> JsonShape:
    view = memoryview(body)
    containers = quotes = commas = 0
    for start in range(0, len(body), BLOCK):
        block = np.frombuffer(view[start : start + BLOCK], dtype=np.uint8)
        containers += _count(block, ord("[")) + _count(block, ord("{"))
        quotes += _count(block, _QUOTE)
        commas += _count(block, _COMMA)
        yield_to_smaller()
    return JsonShape(containers, (quotes + 1) // 2, commas)


def _shape_without_strings(body: bytes | bytearray) -> JsonShape:
    containers = quotes = commas = 0
    for block in _Block.all_of(memoryview(body)):
        containers += int(np.count_nonzero(_STEPS[block.characters] > 0))
        commas += _count(block.characters, _COMMA)
        quotes += block.num_quotes
    return JsonShape(containers, (quotes + 1) // 2, commas)


def _count(characters: NDArray[np.uint8], character: int) -> int:
    return int(np.count_nonzero(characters == character))


@dataclass(frozen=True, slots=True)
class _Block:
    """Brackets, braces and commas outside of strings, by their positions in the text."""

    characters: NDArray[np.uint8]
    positions: NDArray[np.int64]
    num_quotes: int

    @staticmethod
    def all_of(text: memoryview) -> Iterator["_Block"]:
        num_quotes = 0
        for start, stop in pairwise(ends_of_blocks(text)):
            part = bytes(text[start:stop])
            if _BACKSLASH in part:
                part = part.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            block = np.frombuffer(part, dtype=np.uint8)
            positions = np.flatnonzero(_IS_COUNTED[block])
            counted = block[positions]
            is_quote = counted == _QUOTE
            # Between the first quote of a string and its last, their number is odd.
            is_inside = np.logical_xor.accumulate(np.concatenate(([num_quotes % 2 == 1], is_quote)))[1:]
            is_outside = ~(is_inside | is_quote)
            quotes = int(np.count_nonzero(is_quote))
            num_quotes += quotes
            yield _Block(counted[is_outside], positions[is_outside] + start, quotes)
            yield_to_smaller()


def ends_of_blocks(text: memoryview | bytearray) -> Iterator[int]:
    """Ends of blocks. None is within an escape of two characters."""
    stop = 0
    yield stop
    while stop < len(text):
        block = bytes(text[stop : stop + BLOCK])
        has_half = (len(block) - len(block.rstrip(b"\\"))) % 2
        stop = min(stop + len(block) + has_half, len(text))
        yield stop


def decode_in_parts(body: bytes | bytearray, kind: type[T]) -> T:
    """Decodes a JSON object. No call takes long, whatever the object has."""
    if len(body) <= BLOCK and not has_slow_numbers(body):
        # Without `strict`, "1" is a number, and "true" and 1 are booleans.
        return msgspec.json.decode(body, type=kind, strict=False)
    fields = {}
    for name, value in NAMES.decode(body).items():
        try:
            fields[name] = decode_value(value)
        except msgspec.ValidationError as error:
            # It names a place in a part.
            said = str(error).partition(" - at ")[0]
            raise msgspec.ValidationError(f"{said} - at `$.{name}`") from None
    return msgspec.convert(fields, type=kind, strict=False)


def has_slow_numbers(body: bytes | bytearray | memoryview) -> bool:
    """Whether a text may have exponents of three digits, or letters and digits that look like one. msgspec
    takes up to 50 microseconds for numbers near the ends of float64's range."""
    if len(body) < _SHORT:
        return False
    characters = np.frombuffer(body, dtype=np.uint8)
    e = np.flatnonzero((characters[:-4] | 0x20) == ord("e"))
    is_digit = (characters >= ord("0")) & (characters <= ord("9"))
    first = e + 1 + ((characters[e + 1] == ord("-")) | (characters[e + 1] == ord("+")))
    return bool((is_digit[first] & is_digit[first + 1] & is_digit[first + 2]).any())


def decode_value(value: msgspec.Raw, level: int = 1) -> Any:
    """Decodes a value, at this level within others. No call takes long."""
    view = memoryview(value)
    yield_to_smaller()
    if len(view) <= BLOCK:
        return _decoded_part(view)
    if view[0] not in b"[{":
        return msgspec.json.decode(view)
    if level == _DEEPEST_LARGE:
        raise too_deep()
    if view[0] in b"{":
        return {name: decode_value(each, level + 1) for name, each in NAMES.decode(view).items()}
    texts = _decoded_texts(view)
    return texts if texts is not None else _decoded_list(view, level)


def _decoded_part(part: bytes | memoryview) -> Any:
    return msgspec.json.decode(part) if not has_slow_numbers(part) else _WITH_SLOW_NUMBERS.decode(part)


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError("Number out of range")
    return number


_WITH_SLOW_NUMBERS = msgspec.json.Decoder(float_hook=_float)


def _decoded_texts(view: memoryview) -> list[Any] | None:
    """The most usual large lists, of texts or of objects of texts; None for others."""
    decoder = _TEXTS if bytes(view[1:32]).lstrip().startswith(b'"') else _OBJECTS_OF_TEXTS
    try:
        return decoder.decode(view)
    except msgspec.ValidationError:
        return None


def _decoded_list(view: memoryview, level: int) -> list[Any]:
    decoded: list[Any] = []
    for start, stop in pairwise(_ends_of_parts(view)):
        part = b"".join((b"[", view[start + 1 : stop], b"]"))
        if stop - start <= BLOCK:
            decoded += _decoded_part(part)
        else:  # one entry, or none
            decoded += [decode_value(each, level + 1) for each in _ENTRIES.decode(part)]
        yield_to_smaller()
    return decoded


def _ends_of_parts(view: memoryview) -> Iterator[int]:
    """The array's first bracket, the first and the last comma between its entries in each block, and its last
    bracket."""
    yield 0
    depth = 0
    for block in _Block.all_of(view):
        depths = depth + np.cumsum(_STEPS[block.characters], dtype=np.int64)
        commas = block.positions[(block.characters == _COMMA) & (depths == 1)]
        yield from dict.fromkeys(commas[[0, -1]].tolist() if len(commas) else ())
        depth = int(depths[-1]) if len(depths) else depth
    yield len(view) - 1
