"""What a route is, and how the body of one that takes a wire type is read and checked.

What takes time with the size of a body is done in the thread pool for large ones.
"""

import asyncio
import codecs
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from maxsimd.api.answer import (
    Answer,
    body_not_unicode,
    body_too_large,
    malformed,
    too_deep,
    too_large,
)
from maxsimd.api.body import HeldBytes, JsonShape, mended, shape_of
from maxsimd.api.models import SeveralModels, Wanted, naming_lost_model
from maxsimd.api.request_warnings import UnreadField, unread_fields, warnings_of
from maxsimd.api.state import ServerState
from maxsimd.engine import (
    ClassifyResult,
    EmbedResult,
    RequestTimeoutError,
    RerankResult,
    SparseEmbedResult,
    TokenEmbedResult,
)

T = TypeVar("T")
R = TypeVar("R")
# A request's body as it arrives.
Body: TypeAlias = AsyncIterable[bytes]
# What a request asks for, or how that is found in it.
WantedOf: TypeAlias = Wanted | Callable[[ServerState, Any], Wanted]
# Does a request's work, for the tenant that is named last.
Work: TypeAlias = Callable[[ServerState, Body, str], Awaitable[Answer]]

# Bodies of more bytes than this are parsed in the thread pool, so that the event loop goes on, and what they
# have is counted first.
LARGE_BODY = 64 * 1024
# Arrays and objects that a body may have for each document that is allowed, and strings: a record of 20
# fields has 40, with the names of its fields.
_CONTAINERS_A_DOCUMENT, _STRINGS_A_DOCUMENT = 20, 40
# The values are views of the body, not decoded: that takes little time beside decoding all of it.
_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
# How much longer than its timeout a request may take beside the work of the engine.
_LATE_SECONDS = 0.5
# Of a character in JSON, in bytes: two escapes like \ud83d.
_LONGEST_ESCAPE = 12


@dataclass(frozen=True, slots=True)
class Route:
    """A path with the methods that it takes, and what does the work; and what /openapi.json says of it: the
    wire type of its bodies, those of its `answers` (types for JSON, or a media type), and its `status`."""

    path: str
    methods: tuple[str, ...]
    work: Work
    kind: Any = None
    answers: tuple[Any, ...] = (Any,)
    status: int = 200


def get(path: str, handler: Callable[[ServerState], Awaitable[Answer]], *answers: Any) -> Route:
    return Route(path, ("GET", "HEAD"), _without_body(handler), answers=answers or (Any,))


def delete(path: str, handler: Callable[[ServerState], Awaitable[Answer]]) -> Route:
    return Route(path, ("DELETE",), _without_body(handler), answers=(), status=204)


def post(
    path: str, kind: type[T], handler: Callable[[ServerState, T], Awaitable[Answer]], *answers: Any
) -> Route:
    """A route whose body is a wire type, and that any model serves. It takes requests only while the server
    is ready."""

    async def handle(state: ServerState, request: T, nothing: None, tenant: str) -> Answer:
        return await handler(state, request)

    work = _with_body(path, kind, lambda request, most: None, handle, Wanted.ANYTHING)
    return Route(path, ("POST",), work, kind, answers or (Any,))


def post_texts(
    path: str,
    kind: type[T],
    read: Callable[[T, int], R],
    handler: Callable[[ServerState, T, R, str], Awaitable[Answer]],
    *answers: Any,
    wanted: WantedOf,
) -> Route:
    """The same for a handler that also gets what `read` finds in the wire type, of which there may be at most
    a number, and the tenant whose request it is. Nothing is read of a tenant that has used up its rate. What
    is `wanted` chooses the model of a request that names none."""
    handle = _with_body(path, kind, read, handler, wanted)

    async def work(state: ServerState, body: Body, tenant: str) -> Answer:
        state.check_ready()
        state.engine.check_rate(tenant)
        return await handle(state, body, tenant)

    return Route(path, ("POST",), work, kind, answers or (Any,))


def _with_body(
    path: str,
    kind: type[T],
    read: Callable[[T, int], R],
    handler: Callable[[ServerState, T, R, str], Awaitable[Answer]],
    wanted: WantedOf,
) -> Work:
    # msgspec learns a type when it is first used, and crashes where two threads do that at the same time.
    msgspec.json.Decoder(kind)

    async def work(state: ServerState, body: Body, tenant: str) -> Answer:
        state.check_ready()
        with ExitStack() as until_answered:
            held = until_answered.enter_context(state.bodies.hold())
            whole = await read_body(state, body, held)
            request, found, unread = await _parse(state, whole, held, kind, read)
            del whole
            state = state.telling_of([*unread, *state.unread_name(model_of(request))], path)
            asked = wanted if isinstance(wanted, Wanted) else wanted(state, request)
            serving = state.serving(model_of(request), asked)
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
    """Ends work that goes on somewhat longer than the request's `timeout`, such as fetching its pictures and
    writing its chat or its answer. The engine ends its own work at the timeout, and returns partial results
    then."""
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
    """The model that a request names."""
    if not isinstance(request, dict):
        return cast("str | None", request.model)
    # What is not a text is refused later, by the type that is then known.
    named = request.get("model")
    return named if isinstance(named, str) else None


class _Lines:
    """Lines for which something is held until there are no more of them, made by one of the models."""

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


async def read_body(state: ServerState, body: Body, held: HeldBytes) -> bytearray:
    """The whole body and some spaces, unless it is larger than the server allows, or all that are read now
    together are."""
    most = state.max_body_bytes
    read = bytearray()
    async for chunk in body:
        read += chunk
        if len(read) > most:
            raise body_too_large()
        held.add(len(chunk))
    _drop_mark(read)
    # Where half of a character stands in its last bytes, msgspec takes a text for one that breaks off.
    read += b" " * _LONGEST_ESCAPE
    return read


def _drop_mark(body: bytearray) -> None:
    """Removes the mark that some editors write at the beginning of UTF-8. Raises ApiError where the first
    bytes are those of another encoding: JSON is text without null characters."""
    if body.startswith(codecs.BOM_UTF8):
        del body[: len(codecs.BOM_UTF8)]
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in body[:4]:
        raise malformed("the body is UTF-16 or UTF-32, or no text; send JSON in UTF-8")


async def _parse(
    state: ServerState, body: bytearray, held: HeldBytes, kind: type[T], read: Callable[[T, int], R]
) -> tuple[T, R, list[UnreadField]]:
    """The request, what is read of it, and the fields that are not."""
    most = state.config.max_documents

    def parse(decode: Callable[[bytearray, type[T]], T]) -> tuple[T, R, list[UnreadField]]:
        request = decode(body, kind)
        found = read(request, most)
        # The handlers of plain objects look for unread fields themselves.
        unread = unread_fields(request, _NAMES.decode(body)) if isinstance(request, msgspec.Struct) else []
        return request, found, unread

    try:
        # What is in a small body takes little memory, whatever it is.
        if len(body) <= LARGE_BODY:
            try:
                return parse(_decoded)
            except msgspec.DecodeError as error:
                if not _is_about_half(error):
                    raise
            # To find where halves of characters stand takes long for the event loop.
            return await state.engine.in_thread(lambda: parse(mended), len(body))
        most_shape = _most(state)
        shape = await state.engine.in_thread(lambda: shape_of(body, most_shape), len(body))
        _check_shape(shape, most_shape)
        held.add(max(0, shape.memory - len(body)))
        return await state.engine.in_thread(lambda: parse(_decoded_or_mended), len(body))
    except UnicodeDecodeError as error:
        raise body_not_unicode(error.reason) from error
    except RecursionError as error:
        raise too_deep() from error


def _decoded(body: bytearray, kind: type[T]) -> T:
    # Not strict, as others take it too: "1" for a number, "true" or 1 for a yes.
    return msgspec.json.decode(body, type=kind, strict=False)


def _decoded_or_mended(body: bytearray, kind: type[T]) -> T:
    try:
        return _decoded(body, kind)
    except msgspec.DecodeError as error:
        if not _is_about_half(error):
            raise
        return mended(body, kind)


def _is_about_half(error: msgspec.DecodeError) -> bool:
    # The second is said of a value that is skipped.
    return "surrogate pair" in str(error) or "end of hex escape" in str(error)


def _most(state: ServerState) -> JsonShape:
    """The largest shape of a body: what documents may need, and the ids of as many tokens as a request may
    have."""
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


# A request as JSON has it.
Fields = dict[str, Any]


class Form(NamedTuple):
    """A kind of request: its wire type, what is read of it, and what answers it."""

    kind: type[Any]
    read: Callable[[Any, int], Any]
    handler: Callable[[ServerState, Any, Any, str], Awaitable[Answer]]


async def answered_as(form: Form, state: ServerState, fields: Fields, tenant: str, path: str) -> Answer:
    """The answer to these fields as a request of this kind, on the route with this path."""
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
    state = state.telling_of(unread, path)
    with state.bodies.hold() as held:
        if state.reads_pictures:
            found = await state.media.filled(found, held)
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
