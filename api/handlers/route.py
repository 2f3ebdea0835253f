"""Routes, and how their bodies become wire types: decompressed, measured before JSON builds anything,
decoded, and checked for unread fields. Threads do this for large bodies, so that the event loop goes on."""

import asyncio
import codecs
import re
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from maxsimd.api.answer import (
    ENCODINGS,
    Answer,
    ApiError,
    body_not_unicode,
    body_too_large,
    malformed,
    too_deep,
    too_large,
    too_many_members,
    unreadable_body,
)
from maxsimd.api.handlers import json_parts
from maxsimd.api.handlers.json_parts import (
    NAMES,
    JsonShape,
    decode_in_parts,
    decode_value,
    ends_of_blocks,
    has_slow_numbers,
    shape_of,
)
from maxsimd.api.models import SeveralModels, Wanted
from maxsimd.api.reading import UnreadField, has_pictures, unread_fields, warnings_of
from maxsimd.api.state import HeldBytes, ServerState, naming_lost_model
from maxsimd.engine import (
    ClassifyResult,
    EmbedResult,
    InvalidRequestError,
    RequestTimeoutError,
    RerankResult,
    SparseEmbedResult,
    TokenEmbedResult,
)
from maxsimd.engine.workers import yield_to_smaller

T = TypeVar("T")
R = TypeVar("R")
Body: TypeAlias = AsyncIterable[bytes]
# The kind of model that a request needs, or how to find it.
WantedOf: TypeAlias = Wanted | Callable[[ServerState, Any], Wanted]
# The last argument is the tenant.
Work: TypeAlias = Callable[[ServerState, Body, str], Awaitable[Answer]]

# Larger bodies are measured first, and parsed in the thread pool.
LARGE_BODY = 64 * 1024
# Smaller bodies with more values than this are parsed there too. The slowest values take 7 microseconds each
# (fields written as YAML), and an object takes up to 20.
MANY_VALUES, _VALUES_AN_OBJECT = 1500, 5
# Limits for each document that is allowed. A record of 20 fields has 40 strings.
_CONTAINERS_A_DOCUMENT, _STRINGS_A_DOCUMENT = 20, 40
# Time beyond the timeout for work beside the engine.
_LATE_SECONDS = 0.5
# Two escapes like \ud83d.
_LONGEST_ESCAPE = 12


class Group(StrEnum):
    """The groups of routes in /openapi.json and /docs, in their order."""

    RANK = "Rank and score"
    EMBED = "Embed"
    CLASSIFY = "Classify"
    TOKENS = "Tokens"
    TEI = "text-embeddings-inference"
    COHERE = "Cohere"
    OTHERS = "Other services"
    OPERATE = "Operate"


@dataclass(frozen=True, slots=True)
class Shown:
    """Description of a route in /openapi.json and /docs: its group, a line about it, and a body to try."""

    group: Group
    summary: str
    example: Any = None


@dataclass(frozen=True, slots=True)
class Route:
    """A path, its methods and its work. /openapi.json has the types of its bodies (`kinds`), those of its
    `answers` (types for JSON, or a media type), and its `status`."""

    path: str
    methods: tuple[str, ...]
    work: Work
    shown: Shown
    kinds: tuple[Any, ...] = ()
    answers: tuple[Any, ...] = ()
    status: int = 200


def get(path: str, handler: Callable[[ServerState], Awaitable[Answer]], *answers: Any, shown: Shown) -> Route:
    return Route(path, ("GET", "HEAD"), _without_body(handler), shown, answers=answers)


def delete(path: str, handler: Callable[[ServerState], Awaitable[Answer]], shown: Shown) -> Route:
    return Route(path, ("DELETE",), _without_body(handler), shown, status=204)


def post(
    path: str,
    kind: type[T],
    handler: Callable[[ServerState, T], Awaitable[Answer]],
    *answers: Any,
    shown: Shown,
) -> Route:
    """A route with a body that any model serves, while the server is ready."""

    async def handle(state: ServerState, request: T, nothing: None, tenant: str) -> Answer:
        return await handler(state, request)

    work = _with_body(path, kind, lambda request, most: None, handle, Wanted.ANYTHING)
    return Route(path, ("POST",), work, shown, (kind,), answers)


def post_texts(
    path: str,
    kind: type[T],
    read: Callable[[T, int], R],
    handler: Callable[[ServerState, T, R, str], Awaitable[Answer]],
    *answers: Any,
    wanted: WantedOf,
    shown: Shown,
    kinds: tuple[Any, ...] = (),
) -> Route:
    """A route with a body for a handler that also gets the result of `read(request, max_documents)` and the
    tenant. Refuses a tenant that has used up its rate before reading. `wanted` chooses the model of a request
    that names none. `kinds` are the types that a body of any fields may have."""
    handle = _with_body(path, kind, read, handler, wanted)

    async def work(state: ServerState, body: Body, tenant: str) -> Answer:
        state.check_ready()
        state.engine.check_rate(tenant)
        return await handle(state, body, tenant)

    return Route(path, ("POST",), work, shown, kinds or (kind,), answers)


def _with_body(
    path: str,
    kind: type[T],
    read: Callable[[T, int], R],
    handler: Callable[[ServerState, T, R, str], Awaitable[Answer]],
    wanted: WantedOf,
) -> Work:
    # msgspec prepares a type when it is first used, and crashes if two threads do that at a time.
    msgspec.json.Decoder(kind)

    async def work(state: ServerState, body: Body, tenant: str) -> Answer:
        state.check_ready()
        with ExitStack() as until_answered:
            held = until_answered.enter_context(state.bodies.hold())
            state = state.holding(held)
            whole = await read_body(state, body, held)
            request, found, unread = await _parse(state, whole, held, kind, read)
            del whole
            state = state.warning_about([*unread, *state.unread_name(model_of(request))], path)
            need = wanted if isinstance(wanted, Wanted) else wanted(state, request)
            serving = state.serving(model_of(request), need)
            with naming_lost_model(state.models, serving.called):
                async with _timeout_of(request):
                    if serving.reads_pictures:
                        found = await state.media.filled(found, held)
                    answer = await handler(serving, request, found, tenant)
            answer = answer.with_field_warnings(serving.field_warnings)
            if answer.lines is None:
                return answer
            lines = _Lines(answer.lines, until_answered.pop_all(), state.models, serving.called)
            return replace(answer, lines=lines)

    return work


@asynccontextmanager
async def _timeout_of(request: Any) -> AsyncIterator[None]:
    """Ends work beside the engine, such as fetching pictures, that goes on beyond the request's `timeout`.
    The engine ends its own work at the timeout and may return partial results then."""
    timeout = getattr(request, "timeout", None)
    if timeout is None or getattr(request, "on_timeout", None) == "partial":
        yield
        return
    try:
        async with asyncio.timeout(timeout + _LATE_SECONDS):
            yield
    except TimeoutError:
        raise RequestTimeoutError.after(timeout) from None


def model_of(request: Any) -> str | None:
    if not isinstance(request, dict):
        return cast("str | None", request.model)
    # Other values are refused later.
    named = request.get("model")
    return named if isinstance(named, str) else None


class _Lines:
    """Lines of one model's answer that release `held` when they end."""

    def __init__(
        self, lines: AsyncIterator[bytes], held: ExitStack, models: SeveralModels | None, name: str
    ) -> None:
        self._lines = lines
        self._held = held
        self._models, self._name = models, name

    def __aiter__(self) -> "_Lines":
        return self

    async def __anext__(self) -> bytes:
        with naming_lost_model(self._models, self._name):
            return await anext(self._lines)

    async def aclose(self) -> None:
        with self._held:
            close = getattr(self._lines, "aclose", None)
            if close is not None:
                await close()


def _without_body(handler: Callable[[ServerState], Awaitable[Answer]]) -> Work:
    async def work(state: ServerState, body: Body, tenant: str) -> Answer:
        return await handler(state)

    return work


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
    """The compression of a body. Raises ApiError (415) for unsupported and for several encodings."""
    given = (value for name, value in headers.items() if name.lower() == "content-encoding")
    named = ", ".join(given).strip().lower()
    if named not in _ENCODINGS:
        message = f"this Content-Encoding is not taken; use {ENCODINGS}, or none"
        raise ApiError(415, "UnsupportedMediaTypeError", message)
    return _ENCODINGS[named]


def refusal(headers: Mapping[str, str], most_bytes: int) -> ApiError | None:
    """Why a body need not be read, judged by its headers; None if it must be."""
    try:
        is_compressed = encoding_of(headers) is not None
    except ApiError as error:
        return error
    # The length of a compressed body says nothing.
    length = headers.get("content-length", "")
    if not is_compressed and length.isdecimal() and int(length) > most_bytes:
        return body_too_large()
    return None


# Bytes that are decompressed at a time, before other tasks run.
_PIECE = 64 * 1024
# Compressed files in a row. Some writers make one for each 64 KiB; each takes ten microseconds to open.
_MOST_MEMBERS = 10_000
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
# The method that the first byte of zlib's format names (RFC 1950).
_DEFLATED = 8


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
                    raise too_many_members(_MOST_MEMBERS)
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
    # Some clients send raw deflate.
    return zlib.decompressobj(_ZLIB if first & 0x0F == _DEFLATED else _RAW)


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
# Errors name places at most so deep: each level is parsed again.
_DEEPEST = 4


def decode_with_halves(body: bytearray, kind: type[T]) -> T:
    """Decodes a body that has halves of characters, and changes it. Documents with one become `HALF` if the
    request wants errors reported. Raises InvalidRequestError that names another place."""
    mark = _mark_halves(body)
    escaped = re.compile(re.escape(_escaped(mark)))
    fields = NAMES.decode(body)
    known = _DOCUMENTS & {*getattr(kind, "__struct_fields__", _DOCUMENTS)}
    if _text(fields.get("on_error")) != "report" or _text(fields.get("rank_fields")) is not None:
        known = frozenset()
    broken: list[tuple[str, int]] = []
    for name, value in fields.items():
        if chr(mark) in name:
            raise _half_character_error("the name of a field", None)
        for place in _places(value, escaped):
            if place is None or name not in known or not _is_text(place[1], mark, escaped):
                raise _half_character_error(_where(value, name, escaped), name)
            broken.append((name, place[0]))
    request = decode_in_parts(body, kind)
    for name, i in broken:
        (request[name] if isinstance(request, dict) else getattr(request, name))[i] = HALF
    return request


def _mark_halves(body: bytearray) -> int:
    """Replaces each half surrogate by a mark that is not in the body. Returns the mark's code point."""
    escaped = {int(found[1], 16) for found in _found_in_parts(_ESCAPED_MARK, body)}
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
                    body[first:done] = _escaped(mark)
        yield_to_smaller()
    return mark


def _found_in_parts(pattern: re.Pattern[bytes], text: bytearray | msgspec.Raw) -> Iterator[re.Match[bytes]]:
    """Where a pattern is found, perhaps twice."""
    for start in range(0, len(memoryview(text)), json_parts.BLOCK):
        yield from pattern.finditer(text, start, start + json_parts.BLOCK + _LONGEST_ESCAPE)
        yield_to_smaller()


def _escaped(mark: int) -> bytes:
    return rb"\u%04x" % mark


def _has(value: msgspec.Raw, mark: re.Pattern[bytes]) -> bool:
    return any(_found_in_parts(mark, value))


def _begins(value: msgspec.Raw, character: bytes) -> bool:
    return bytes(memoryview(value)[:1]) == character


def _places(value: msgspec.Raw, mark: re.Pattern[bytes]) -> Iterator[tuple[int, msgspec.Raw] | None]:
    """The entries of a list that have the mark, by index; None for a value that is no list."""
    if not _has(value, mark):
        return
    if not _begins(value, b"["):
        yield None
        return
    for i, each in enumerate(msgspec.json.decode(value, type=list[msgspec.Raw])):
        if _has(each, mark):
            yield i, each


def _is_text(value: msgspec.Raw, mark: int, escaped: re.Pattern[bytes]) -> bool:
    """Whether a document is a text, or an object with the mark in its text alone."""
    if not _begins(value, b"{"):
        return _begins(value, b'"')
    fields = NAMES.decode(value)
    text = fields.pop("text", None)
    if text is None or not _begins(text, b'"'):
        return False
    has_more = any(chr(mark) in name or _has(each, escaped) for name, each in fields.items())
    return not has_more and not has_pictures({name: decode_value(each) for name, each in fields.items()})


def _where(value: msgspec.Raw, path: str, mark: re.Pattern[bytes]) -> str:
    """The place of the first text with the mark, for errors."""
    for _ in range(_DEEPEST):
        if _begins(value, b"["):
            place = next(_places(value, mark), None)
            assert place is not None
            path, value = f"{path}[{place[0]}]", place[1]
        elif _begins(value, b"{"):
            fields = NAMES.decode(value)
            name = next((name for name, each in fields.items() if _has(each, mark)), None)
            if name is None:  # a name has it
                break
            path, value = f"{path}.{name}", fields[name]
        else:
            break
    return path


def _text(value: msgspec.Raw | None) -> Any:
    return None if value is None else decode_value(value)


def _half_character_error(where: str, param: str | None) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} has half of a character, like \\ud83d alone; send whole characters, or leave it out", param
    )


async def read_body(state: ServerState, body: Body, held: HeldBytes) -> bytearray:
    """Returns the whole body and some spaces. Raises ApiError if it, or all bodies together, are too
    large."""
    most = state.max_body_bytes
    read = bytearray()
    async for chunk in body:
        read += chunk
        if len(read) > most:
            raise body_too_large()
        held.add(len(chunk))
    _drop_mark(read)
    # Without these spaces, msgspec reports half of a character at the end as a text that breaks off.
    read += b" " * _LONGEST_ESCAPE
    return read


def _drop_mark(body: bytearray) -> None:
    """Removes UTF-8's byte order mark. Raises ApiError if the first bytes belong to another encoding: JSON
    has no null characters."""
    if body.startswith(codecs.BOM_UTF8):
        del body[: len(codecs.BOM_UTF8)]
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in body[:4]:
        raise malformed("the body is UTF-16 or UTF-32, or no text; send JSON in UTF-8")


async def _parse(
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

    try:
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
        most_shape = _most(state)
        shape = await state.engine.in_thread(lambda: shape_of(body, most_shape), len(body))
        _check_shape(shape, most_shape)
        held.add(max(0, shape.memory - len(body)))
        return await state.engine.in_thread(lambda: parse(_decoded_with_halves), len(body))
    except UnicodeDecodeError as error:
        raise body_not_unicode(error.reason) from error
    except RecursionError as error:
        raise too_deep() from error


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


def _most(state: ServerState) -> JsonShape:
    """The largest shape of a body: for documents, and for as many token ids as a request may have."""
    containers = _CONTAINERS_A_DOCUMENT * state.config.max_documents
    strings = _STRINGS_A_DOCUMENT * state.config.max_documents
    return JsonShape(containers, strings, containers + strings + state.engine.config.max_request_tokens)


def _check_shape(shape: JsonShape, most: JsonShape) -> None:
    if shape.containers > most.containers:
        raise too_large(
            f"the body has more than {most.containers} arrays and objects; send fewer documents at a time"
        )
    if shape.strings > most.strings:
        raise too_large(
            f"the body has more than {most.strings} strings, names of fields included; send fewer documents "
            "at a time, or documents of fewer fields"
        )
    if shape.commas > most.commas:
        raise too_large(
            f"the body has more than {most.commas} values; send fewer token ids at a time, or raise "
            "--max-request-tokens"
        )


Fields = dict[str, Any]


class Form(NamedTuple):
    """A kind of request: its wire type, how it is read, and its handler."""

    kind: type[Any]
    read: Callable[[Any, int], Any]
    handler: Callable[[ServerState, Any, Any, str], Awaitable[Answer]]


async def answered_as(form: Form, state: ServerState, fields: Fields, tenant: str, path: str) -> Answer:
    """Answers fields as a request of one kind, on the route `path`."""
    most = state.config.max_documents

    def read() -> tuple[Any, Any, list[UnreadField]]:
        request = msgspec.convert(fields, type=form.kind, strict=False)
        return request, form.read(request, most), unread_fields(request, fields)

    size = sum(len(value) for value in fields.values() if isinstance(value, str | list))
    try:
        request, found, unread = await state.engine.in_thread(read, size)
    except RecursionError as error:
        raise too_deep() from error
    state.check_model(request.model)
    state = state.warning_about(unread, path)
    if state.reads_pictures:
        found = await state.media.filled(found, state.held)
    answer = await form.handler(state, request, found, tenant)
    return answer.with_field_warnings(state.field_warnings)


class TeiHeaders:
    """text-embeddings-inference's headers on the work for `texts`; times are whole milliseconds. Make it
    before the engine runs, which may die meanwhile."""

    def __init__(self, state: ServerState, texts: Iterable[object]) -> None:
        self._device = "cpu" if state.engine.facts.device == "cpu" else "gpu"
        self._field_warnings = state.field_warnings
        self._characters = sum(len(text) for text in texts if isinstance(text, str))

    def added_to(
        self,
        answer: Answer,
        result: EmbedResult | TokenEmbedResult | SparseEmbedResult | ClassifyResult | RerankResult,
        *warnings: str,
    ) -> Answer:
        """Returns the answer with these headers and with our own for timings and warnings."""
        timings = result.timings
        total = timings.queue + timings.tokenise + timings.model
        milliseconds = [
            str(round(seconds * 1e3)) for seconds in (total, timings.tokenise, timings.queue, timings.model)
        ]
        complete = answer.with_timings(timings).with_warnings(
            [*(warnings_of(result.truncated, self._field_warnings) or ()), *warnings]
        )
        return complete.with_headers(
            x_compute_type=self._device,
            x_compute_time=milliseconds[0],
            x_compute_characters=str(self._characters),
            x_compute_tokens=str(result.usage.prompt_tokens),
            x_total_time=milliseconds[0],
            x_tokenization_time=milliseconds[1],
            x_queue_time=milliseconds[2],
            x_inference_time=milliseconds[3],
        )
