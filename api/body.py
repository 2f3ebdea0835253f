"""Bodies of requests as bytes: encoding, decompression, the memory that they hold, the size of what JSON
builds of them, and escaped surrogates without their other half."""

import asyncio
import re
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from maxsimd.api.answer import ENCODINGS, ApiError, body_too_large, unreadable_body
from maxsimd.api.reading import has_pictures
from maxsimd.engine import InvalidRequestError

# How a body is compressed; None where it is not.
Encoding: TypeAlias = Literal["gzip", "deflate"]
# By the names that clients give them (RFC 9110, section 8.4.1).
_ENCODINGS: dict[str, Encoding | None] = {
    "": None,
    "identity": None,
    "gzip": "gzip",
    "x-gzip": "gzip",
    "deflate": "deflate",
}


def encoding_of(headers: Mapping[str, str]) -> Encoding | None:
    """Raises ApiError (415) for an encoding that is not taken, and for several one upon the other."""
    given = (value for name, value in headers.items() if name.lower() == "content-encoding")
    named = ", ".join(given).strip().lower()
    if named not in _ENCODINGS:
        message = f"this Content-Encoding is not taken; use {ENCODINGS}, or none"
        raise ApiError(415, "UnsupportedMediaTypeError", message)
    return _ENCODINGS[named]


def refusal(headers: Mapping[str, str], most_bytes: int) -> ApiError | None:
    """Why a body need not be waited for, of which at most `most_bytes` are taken, decompressed; None where it
    is to be read."""
    try:
        is_compressed = encoding_of(headers) is not None
    except ApiError as error:
        return error
    # A compressed body is as long as it turns out to be.
    length = headers.get("content-length", "")
    if not is_compressed and length.isdecimal() and int(length) > most_bytes:
        return body_too_large()
    return None


# The most bytes that are made at a time, before others have their turn.
_PIECE = 64 * 1024
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
# The method that the first byte of zlib's format names (RFC 1950).
_DEFLATED = 8


async def decompressed(chunks: AsyncIterable[bytes], encoding: Encoding) -> AsyncIterator[bytes]:
    """The body in pieces. Raises ApiError (400) where it is not of that encoding, or ends too early."""
    decompressor = None
    async for left in chunks:
        piece = b""
        # What has been read may be more than a piece even where nothing is left.
        while left or len(piece) == _PIECE:
            if decompressor is None or (decompressor.eof and encoding == "gzip" and left):
                # Compressed files one behind the other are one file (RFC 1952).
                decompressor = _decompressor(encoding, left[0])
            try:
                piece = decompressor.decompress(left, _PIECE)
            except zlib.error as error:
                raise unreadable_body() from error
            left = decompressor.unconsumed_tail or decompressor.unused_data
            if piece:
                yield piece
                await asyncio.sleep(0)
            if decompressor.eof and left and encoding != "gzip":
                raise unreadable_body()
    if decompressor is not None and not decompressor.eof:
        raise unreadable_body()


def _decompressor(encoding: Encoding, first: int) -> "zlib._Decompress":
    if encoding == "gzip":
        return zlib.decompressobj(_GZIP)
    # Some clients send what the format holds without the format.
    return zlib.decompressobj(_ZLIB if first & 0x0F == _DEFLATED else _RAW)


class HeldBytes:
    """What one request holds of a `BodyBudget`."""

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self.bytes = 0

    def add(self, count: int) -> None:
        """Holds `count` bytes more. Raises ApiError (429) where others hold too much; alone a body may be
        as large as bodies may be."""
        if self._budget.bytes > self.bytes and self._budget.bytes + count > self._budget.most:
            message = "other requests' bodies take the memory that there is for them; try again shortly"
            raise ApiError(429, "QueueFullError", message, retry_after=1)
        self.bytes += count
        self._budget.bytes += count


class BodyBudget:
    """The bytes that all requests together hold, at most `most` while there are several."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0

    @contextmanager
    def hold(self) -> Iterator[HeldBytes]:
        """For one request, until it is answered."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.bytes -= held.bytes


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


T = TypeVar("T")
Fields = dict[str, msgspec.Raw]

# A document that the engine refuses: a text of nothing but half of a character.
HALF = "\ud83d"
# An escaped surrogate, and its other half if that is there. Behind an escaped backslash, `ud83d` is text. The
# repeat gives nothing back, or a body of backslashes would take gigabytes.
_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*+\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
_LENGTH = len(rb"\ud83d")
# Characters that no text should have (Unicode's noncharacters), which mark where halves stood.
_MARKS = range(0xFDD0, 0xFDF0)
_ESCAPED_MARK = re.compile(rb"\\u([fF][dD][dDeE][0-9a-fA-F])")
_DOCUMENTS = frozenset({"documents", "items", "text_2", "data_2"})
# How many levels deep errors name the place: each level is parsed again.
_DEEPEST = 4


def mended(body: bytearray, kind: type[T]) -> T:
    """Decodes a body that has halves of characters, which it changes: documents with one are `HALF`, if the
    request wants their errors reported. Raises InvalidRequestError that says where another is."""
    mark = _mark_in(body)
    escaped = re.compile(re.escape(_escaped(mark)))
    fields = msgspec.json.decode(body, type=Fields)
    known = _DOCUMENTS & {*getattr(kind, "__struct_fields__", _DOCUMENTS)}
    if _text(fields.get("on_error")) != "report" or _text(fields.get("rank_fields")) is not None:
        known = frozenset()
    broken: list[tuple[str, int]] = []
    for name, value in fields.items():
        if chr(mark) in name:
            raise _refusal("the name of a field", None)
        for place in _places(value, escaped):
            if place is None or name not in known or not _is_text(place[1], mark):
                raise _refusal(_where(value, name, escaped), name)
            broken.append((name, place[0]))
    request = msgspec.json.decode(body, type=kind, strict=False)
    for name, i in broken:
        (request[name] if isinstance(request, dict) else getattr(request, name))[i] = HALF
    return request


def _mark_in(body: bytearray) -> int:
    """Puts a mark in the place of each half, one that the body does not have; returns its code point."""
    # One search for all of them: each goes through the whole body.
    escaped = {int(found[1], 16) for found in _ESCAPED_MARK.finditer(body)}
    mark = next((each for each in _MARKS if each not in escaped and chr(each).encode() not in body), None)
    if mark is None:
        raise _refusal("the body", None)
    for found in _SURROGATE.finditer(body):
        if found[1] is None:
            body[found.end() - _LENGTH : found.end()] = _escaped(mark)
    return mark


def _escaped(mark: int) -> bytes:
    return rb"\u%04x" % mark


def _has(value: msgspec.Raw, mark: re.Pattern[bytes]) -> bool:
    # A copy of the value may be large.
    return mark.search(value) is not None


def _begins(value: msgspec.Raw, character: bytes) -> bool:
    return bytes(memoryview(value)[:1]) == character


def _places(value: msgspec.Raw, mark: re.Pattern[bytes]) -> Iterator[tuple[int, msgspec.Raw] | None]:
    """The entries of a list that have the mark, by their index; None where a value has it that is no list."""
    if not _has(value, mark):
        return
    if not _begins(value, b"["):
        yield None
        return
    for i, each in enumerate(msgspec.json.decode(value, type=list[msgspec.Raw])):
        if _has(each, mark):
            yield i, each


def _is_text(value: msgspec.Raw, mark: int) -> bool:
    """Whether a document is a text, or an object that has the mark in its text alone."""
    document = msgspec.json.decode(value)
    if not isinstance(document, dict):
        return isinstance(document, str)
    text = document.pop("text", None)
    has_more = chr(mark).encode() in msgspec.json.encode(document)
    return isinstance(text, str) and not has_pictures(document) and not has_more


def _where(value: msgspec.Raw, path: str, mark: re.Pattern[bytes]) -> str:
    """Returns the name that errors give to the first text with the mark."""
    for _ in range(_DEEPEST):
        if _begins(value, b"["):
            place = next(_places(value, mark), None)
            assert place is not None
            path, value = f"{path}[{place[0]}]", place[1]
        elif _begins(value, b"{"):
            fields = msgspec.json.decode(value, type=Fields)
            name = next((name for name, each in fields.items() if _has(each, mark)), None)
            if name is None:  # a name has it
                break
            path, value = f"{path}.{name}", fields[name]
        else:
            break
    return path


def _text(value: msgspec.Raw | None) -> Any:
    return None if value is None else msgspec.json.decode(value)


def _refusal(where: str, param: str | None) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} has half of a character, like \\ud83d alone; send whole characters, or leave it out", param
    )
