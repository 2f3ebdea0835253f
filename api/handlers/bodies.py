"""Bodies of requests: decompressed, measured before JSON builds anything, decoded, and checked for unread
fields. Large ones are measured and decoded in threads, in parts, because each call of NumPy or msgspec holds
Python's lock until it returns."""

import asyncio
import codecs
import re
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import le
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from maxsimd.api.answer import ApiError
from maxsimd.api.reading import UnreadField, has_pictures, unread_fields
from maxsimd.api.state import HeldBytes, ServerState
from maxsimd.engine import InvalidRequestError
from maxsimd.engine.workers import yield_to_smaller

T = TypeVar("T")
R = TypeVar("R")
Body: TypeAlias = AsyncIterable[bytes]

# Larger bodies are measured first, and parsed in the thread pool.
LARGE_BODY = 64 * 1024
# Smaller bodies with more values than this are parsed there too. The slowest values take 7 microseconds each
# (fields written as YAML), and an object takes up to 20.
MANY_VALUES, _VALUES_AN_OBJECT = 1500, 5
# Limits for each document that is allowed. A record of 20 fields has 40 strings.
_CONTAINERS_A_DOCUMENT, _STRINGS_A_DOCUMENT = 20, 40
# Two escapes like \ud83d.
_LONGEST_ESCAPE = 12
BLOCK = 1 << 18
_QUOTE, _BACKSLASH, _COMMA = (ord(character) for character in '"\\,')
# How each character changes the depth of nesting.
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[[*b"[{"]], _STEPS[[*b"]}"]] = 1, -1
_IS_COUNTED = _STEPS != 0
_IS_COUNTED[[_QUOTE, _COMMA]] = True
# About how many bytes of memory Python's objects take at most. A value follows each comma.
_CONTAINER_BYTES, _STRING_BYTES, _COMMA_BYTES = 80, 80, 40
# Levels of nesting at which values larger than a block are read.
_DEEPEST_LARGE = 12
# Values stay undecoded views of the body, which takes little time.
NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(list[msgspec.Raw])
_TEXTS, _OBJECTS_OF_TEXTS = msgspec.json.Decoder(list[str]), msgspec.json.Decoder(list[dict[str, str]])
# Entries of a list that are looked at before smaller work runs.
_MANY_ENTRIES = 4096
# The slowest numbers of a text of fewer bytes take a millisecond.
_SHORT = 1024


class JsonShape(NamedTuple):
    """Counts of a JSON text: arrays and objects (`containers`), strings with names of fields, and commas."""

    containers: int
    strings: int
    commas: int

    @property
    def memory(self) -> int:
        """About how many bytes Python's objects take, without the characters of strings."""
        return self.containers * _CONTAINER_BYTES + self.strings * _STRING_BYTES + self.commas * _COMMA_BYTES

    def is_within(self, most: "JsonShape") -> bool:
        return all(map(le, self, most))


def shape_of(body: bytes | bytearray, most: JsonShape) -> JsonShape:
    """The shape of a JSON text. First counts the contents of strings too. If that is beyond `most`, or takes
    more memory than the body, counts again without them. The result is meaningless for bytes that are
    not JSON."""
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
        raise RecursionError("too many levels of large values")
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
    """The array's brackets, and between them the first and last comma between entries in each block."""
    yield 0
    depth = 0
    for block in _Block.all_of(view):
        depths = depth + np.cumsum(_STEPS[block.characters], dtype=np.int64)
        commas = block.positions[(block.characters == _COMMA) & (depths == 1)]
        yield from dict.fromkeys(commas[[0, -1]].tolist() if len(commas) else ())
        depth = int(depths[-1]) if len(depths) else depth
    yield len(view) - 1


Encoding: TypeAlias = Literal["gzip", "deflate"]
_TAKEN = "gzip, deflate"
_TOO_LARGE = "the body is too large; send fewer documents at a time, or raise --max-body-mb"
# By the names that clients give them (RFC 9110, section 8.4.1).
_ENCODINGS: dict[str, Encoding | None] = {
    "": None,
    "identity": None,
    "gzip": "gzip",
    "x-gzip": "gzip",
    "deflate": "deflate",
}


def encoding_of(headers: Mapping[str, str]) -> Encoding | None:
    """The compression of a body. Raises ApiError (415) for unsupported and for several encodings."""
    given = (value for name, value in headers.items() if name.lower() == "content-encoding")
    named = ", ".join(given).strip().lower()
    if named not in _ENCODINGS:
        message = f"this Content-Encoding is not supported; use {_TAKEN}, or none"
        raise ApiError(415, message, headers={"Accept-Encoding": _TAKEN})
    return _ENCODINGS[named]


def refusal(headers: Mapping[str, str], most_bytes: int) -> ApiError | None:
    """The error for a body that its headers already rule out, or None."""
    try:
        is_compressed = encoding_of(headers) is not None
    except ApiError as error:
        return error
    # The length of a compressed body says nothing.
    length = headers.get("content-length", "")
    if not is_compressed and length.isdecimal() and int(length) > most_bytes:
        return ApiError(413, _TOO_LARGE)
    return None


# Bytes that are decompressed at a time, before other tasks run.
_PIECE = 64 * 1024
# Compressed files in a row. Some writers make one for each 64 KiB; each takes ten microseconds to open.
_MOST_MEMBERS = 10_000
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
# The method that the first byte of zlib's format names (RFC 1950).
_DEFLATED = 8


def unreadable_body() -> ApiError:
    return ApiError(
        400,
        "the body does not match its headers, or is incomplete; check Content-Encoding and Content-Length",
    )


async def decompressed(chunks: AsyncIterable[bytes], encoding: Encoding) -> AsyncIterator[bytes]:
    """The body in pieces. Raises ApiError (400) for another encoding, and for a body that ends too early."""
    decompressor = None
    members = 0
    async for left in chunks:
        piece = b""
        # More output may follow a full piece even if no input is left.
        while left or len(piece) == _PIECE:
            if decompressor is None or (decompressor.eof and encoding == "gzip" and left):
                # Compressed files in a row are one file (RFC 1952).
                members += 1
                if members > _MOST_MEMBERS:
                    raise ApiError(
                        413,
                        f"the body is more than {_MOST_MEMBERS} compressed files in a row; send it as one",
                    )
                # Some clients send raw deflate.
                kind = _ZLIB if left[0] & 0x0F == _DEFLATED else _RAW
                decompressor = zlib.decompressobj(_GZIP if encoding == "gzip" else kind)
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


# The engine refuses this document.
HALF = "\ud83d"
# An escaped surrogate, and its other half if that follows.
_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
# Noncharacters of Unicode, which mark where halves stood.
_MARKS = range(0xFDD0, 0xFDF0)
_ESCAPED_MARK = re.compile(rb"\\u([fF][dD][dDeE][0-9a-fA-F])")
_DOCUMENTS = frozenset({"documents", "items", "text_2", "data_2"})


def decode_with_halves(body: bytearray, kind: type[T]) -> T:
    """Decodes a body that has halves of characters, and changes it. Documents with one become `HALF` if the
    request wants errors reported. Raises InvalidRequestError that names another place."""
    mark = _mark_halves(body)
    fields = decode_in_parts(body, dict[str, Any])
    known = _DOCUMENTS & {*getattr(kind, "__struct_fields__", _DOCUMENTS)}
    if fields.get("on_error") != "report" or fields.get("rank_fields") is not None:
        known = frozenset()
    broken: list[tuple[str, int]] = []
    for name, value in fields.items():
        if mark in name:
            raise _half_character_error("the name of a field", None)
        are_reported = name in known and isinstance(value, list)
        for i, each in enumerate(value if are_reported else [value]):
            path = _path_to(mark, each)
            if path is None:
                continue
            if not are_reported or not _is_in_text_alone(mark, each):
                raise _half_character_error("".join([name, f"[{i}]" * are_reported, *path]), name)
            broken.append((name, i))
    request = decode_in_parts(body, kind)
    for name, i in broken:
        (request[name] if isinstance(request, dict) else getattr(request, name))[i] = HALF
    return request


def _mark_halves(body: bytearray) -> str:
    """Replaces each half surrogate by a mark, a character that is not in the body. Returns it."""
    escaped = set()
    for start in range(0, len(body), BLOCK):
        found_here = _ESCAPED_MARK.finditer(body, start, start + BLOCK + _LONGEST_ESCAPE)
        escaped |= {int(found[1], 16) for found in found_here}
        yield_to_smaller()
    mark = next((each for each in _MARKS if each not in escaped and chr(each).encode() not in body), None)
    if mark is None:
        raise _half_character_error("the body", None)
    done = 0
    for start, stop in pairwise(ends_of_blocks(body)):
        # Behind an escaped backslash, `ud83d` is text.
        part = bytes(body[start : stop + _LONGEST_ESCAPE]).replace(rb"\\", b"__")
        for found in _SURROGATE.finditer(part):
            first = start + found.start()
            if done <= first < stop:
                done = start + found.end()
                if found[1] is None:
                    body[first:done] = rb"\u%04x" % mark
        yield_to_smaller()
    return chr(mark)


def _path_to(mark: str, value: Any) -> list[str] | None:
    """The path in a value to the first text with the mark, or to an object that has it in a name."""
    if isinstance(value, str):
        return [] if mark in value else None
    if not isinstance(value, list | dict):
        return None
    entries: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for place, each in entries:
        if isinstance(place, str) and mark in place:
            return []
        if isinstance(each, str | list | dict) and (path := _path_to(mark, each)) is not None:
            return [f".{place}" if isinstance(place, str) else f"[{place}]", *path]
        if isinstance(place, int) and place % _MANY_ENTRIES == 0:
            yield_to_smaller()
    return None


def _is_in_text_alone(mark: str, document: Any) -> bool:
    """Whether a document is a text, or an object with the mark in its text alone."""
    if not isinstance(document, dict):
        return isinstance(document, str)
    rest = {name: each for name, each in document.items() if name != "text"}
    return isinstance(document.get("text"), str) and _path_to(mark, rest) is None and not has_pictures(rest)


def _half_character_error(where: str, param: str | None) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} has half of a character, like \\ud83d alone; send whole characters, or leave it out", param
    )


async def read_body(state: ServerState, body: Body, held: HeldBytes) -> bytearray:
    """The whole body and some spaces. Raises ApiError if it, or all bodies together, are too large."""
    most = state.max_body_bytes
    read = bytearray()
    async for chunk in body:
        read += chunk
        if len(read) > most:
            raise ApiError(413, _TOO_LARGE)
        held.add(len(chunk))
    if read.startswith(codecs.BOM_UTF8):
        del read[: len(codecs.BOM_UTF8)]
    # JSON has no null characters.
    if read.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in read[:4]:
        raise ApiError(400, "the body is UTF-16 or UTF-32, or no text; send JSON in UTF-8")
    # Without these spaces, msgspec reports half of a character at the end as a text that breaks off.
    read += b" " * _LONGEST_ESCAPE
    return read


@contextmanager
def wrong_bodies_refused() -> Iterator[None]:
    """Turns errors of decoding into an ApiError (400) that says what is wrong with the body."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: a string is not UTF-8 ({error.reason})") from error
    except RecursionError as error:
        raise ApiError(400, "arrays and objects in the body are nested too deeply") from error


async def parse_body(
    state: ServerState, body: bytearray, held: HeldBytes, kind: type[T], read: Callable[[T, int], R]
) -> tuple[T, R, list[UnreadField]]:
    """Returns the request, the result of `read`, and the unread fields."""
    most = state.config.max_documents

    def parse(decode: Callable[[bytearray, type[T]], T]) -> tuple[T, R, list[UnreadField]]:
        request = decode(body, kind)
        found = read(request, most)
        # Handlers of plain objects look for unread fields themselves.
        unread = unread_fields(request, NAMES.decode(body)) if isinstance(request, msgspec.Struct) else []
        return request, found, unread

    with wrong_bodies_refused():
        # A small body takes little memory.
        if len(body) <= LARGE_BODY:
            if _has_many_values(body):
                return await state.engine.in_thread(lambda: parse(_decoded_with_halves), len(body))
            try:
                return parse(lambda body, kind: msgspec.json.decode(body, type=kind, strict=False))
            except msgspec.DecodeError as error:
                if not _reports_half_character(error):
                    raise
            # Finding halves of characters takes too long for the event loop.
            return await state.engine.in_thread(lambda: parse(decode_with_halves), len(body))
        containers, strings = _CONTAINERS_A_DOCUMENT * most, _STRINGS_A_DOCUMENT * most
        # A request may have as many token ids beside.
        commas = containers + strings + state.engine.config.max_request_tokens
        most_shape = JsonShape(containers, strings, commas)
        shape = await state.engine.in_thread(lambda: shape_of(body, most_shape), len(body))
        _check_shape(shape, most_shape)
        held.add(max(0, shape.memory - len(body)))
        return await state.engine.in_thread(lambda: parse(_decoded_with_halves), len(body))


def _has_many_values(body: bytearray) -> bool:
    """Whether a body has so many values, or so slow ones, that reading them would keep the event loop busy.
    Commas within texts count as well. Nesting without commas ends at Python's recursion limit."""
    many = body.count(b",") + _VALUES_AN_OBJECT * body.count(b"{") > MANY_VALUES
    return many or has_slow_numbers(body)


def _decoded_with_halves(body: bytearray, kind: type[T]) -> T:
    try:
        return decode_in_parts(body, kind)
    except msgspec.DecodeError as error:
        if not _reports_half_character(error):
            raise
        return decode_with_halves(body, kind)


def _reports_half_character(error: msgspec.DecodeError) -> bool:
    # msgspec says the second of values that it skips.
    return "surrogate pair" in str(error) or "end of hex escape" in str(error)


def _check_shape(shape: JsonShape, most: JsonShape) -> None:
    for name, kind, remedy in (
        ("containers", "arrays and objects", "send fewer documents at a time"),
        (
            "strings",
            "strings, names of fields included",
            "send fewer documents at a time, or documents of fewer fields",
        ),
        ("commas", "values", "send fewer token ids at a time, or raise --max-request-tokens"),
    ):
        if getattr(shape, name) > getattr(most, name):
            raise ApiError(413, f"the body has more than {getattr(most, name)} {kind}; {remedy}")
