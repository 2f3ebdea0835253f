"""Routes: what each takes and answers, and the way of a request through them to its handler."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from maxsimd.api.answer import Answer, wire_answer
from maxsimd.api.handlers.bodies import Body, parse_body, read_body, wrong_bodies_refused
from maxsimd.api.models import Wanted
from maxsimd.api.reading import UnreadField, unread_fields, warnings_of
from maxsimd.api.state import ServerState, naming_lost_model
from maxsimd.api.wire import Warnings
from maxsimd.engine import (
    ClassifyResult,
    EmbedResult,
    RequestTimeoutError,
    RerankResult,
    ScoreResult,
    SparseEmbedResult,
    TokenEmbedResult,
)

T = TypeVar("T")
R = TypeVar("R")
# The kind of model that a request needs, or how to find it.
WantedOf: TypeAlias = Wanted | Callable[[ServerState, Any], Wanted]
# The last argument is the tenant.
Work: TypeAlias = Callable[[ServerState, Body, str], Awaitable[Answer]]
Result: TypeAlias = (
    ScoreResult | RerankResult | EmbedResult | TokenEmbedResult | SparseEmbedResult | ClassifyResult
)

# Time beyond the timeout for work beside the engine.
_LATE_SECONDS = 0.5


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


class Form(NamedTuple, Generic[T, R]):
    """A kind of request: its wire type, how the texts of one are read (with the most documents that it may
    have), and its handler, which also gets these texts and the tenant."""

    kind: type[T]
    read: Callable[[T, int], R]
    handler: Callable[[ServerState, T, R, str], Awaitable[Answer]]


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

    work = _with_body(path, Form(kind, lambda request, most: None, handle), Wanted.ANYTHING)
    return Route(path, ("POST",), work, shown, (kind,), answers)


def post_texts(
    paths: Iterable[str],
    form: Form[T, R],
    wanted: WantedOf,
    shown: Shown,
    *answers: Any,
    kinds: tuple[Any, ...] = (),
) -> list[Route]:
    """Routes with a body of this form. They refuse a tenant that has used up its rate before reading.
    `wanted` chooses the model of a request that names none. `kinds` are the types that a body of any fields
    may have."""

    def route(path: str) -> Route:
        handle = _with_body(path, form, wanted)

        async def work(state: ServerState, body: Body, tenant: str) -> Answer:
            state.check_ready()
            state.engine.check_rate(tenant)
            return await handle(state, body, tenant)

        return Route(path, ("POST",), work, shown, kinds or (form.kind,), answers)

    return [route(path) for path in paths]


def _without_body(handler: Callable[[ServerState], Awaitable[Answer]]) -> Work:
    async def work(state: ServerState, body: Body, tenant: str) -> Answer:
        return await handler(state)

    return work


def _with_body(path: str, form: Form[T, R], wanted: WantedOf) -> Work:
    # msgspec prepares a type when it is first used, and crashes if two threads do that at a time.
    msgspec.json.Decoder(form.kind)

    async def work(state: ServerState, body: Body, tenant: str) -> Answer:
        state.check_ready()
        with ExitStack() as until_answered:
            held = until_answered.enter_context(state.bodies.hold())
            state = state.holding(held)
            whole = await read_body(state, body, held)
            request, found, unread = await parse_body(state, whole, held, form.kind, form.read)
            del whole
            state = state.warning_about([*unread, *state.unread_name(model_of(request))], path)
            need = wanted if isinstance(wanted, Wanted) else wanted(state, request)
            serving = state.serving(model_of(request), need)
            until_answered.enter_context(naming_lost_model(state.models, serving.called))
            answer = await _handled(form, serving, request, found, tenant)
            return answer if answer.lines is None else replace(answer, within=until_answered.pop_all())

    return work


async def _handled(form: Form[T, R], state: ServerState, request: T, found: R, tenant: str) -> Answer:
    async with _timeout_of(request):
        if found is not None and state.reads_pictures:
            found = await state.media.filled(found, state.held)
        answer = await form.handler(state, request, found, tenant)
    return answer.with_field_warnings(state.field_warnings)


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


Fields = dict[str, Any]


async def answered_as(form: Form[T, R], state: ServerState, fields: Fields, tenant: str, path: str) -> Answer:
    """Answers fields as a request of one form, on the route `path`."""
    most = state.config.max_documents

    def read() -> tuple[T, R, list[UnreadField]]:
        request = msgspec.convert(fields, type=form.kind, strict=False)
        return request, form.read(request, most), unread_fields(cast("msgspec.Struct", request), fields)

    size = sum(len(value) for value in fields.values() if isinstance(value, str | list))
    with wrong_bodies_refused():
        request, found, unread = await state.engine.in_thread(read, size)
    return await _handled(form, state.warning_about(unread, path), request, found, tenant)


async def answer_of(
    state: ServerState,
    body: msgspec.Struct,
    result: Result,
    build: Callable[[Warnings], Any],
    items: int,
    characters: int = 0,
) -> Answer:
    """Answers with the wire type that `build` makes with the warnings; see `wire_answer`."""
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    answer = await wire_answer(lambda: build(warnings), items, characters)
    return answer.with_timings(result.timings).with_warnings(warnings)


class TeiHeaders:
    """text-embeddings-inference's headers on the work for `texts`; times are whole milliseconds. Make it
    before the engine runs, which may die meanwhile."""

    def __init__(self, state: ServerState, texts: Iterable[object]) -> None:
        self._device = "cpu" if state.engine.facts.device == "cpu" else "gpu"
        self._field_warnings = state.field_warnings
        self._characters = sum(len(text) for text in texts if isinstance(text, str))

    def added_to(self, answer: Answer, result: Result, *warnings: str) -> Answer:
        """Returns the answer with these headers and with our own for timings and warnings."""
        timings = result.timings
        whole = timings.queue + timings.tokenise + timings.model
        seconds = {"compute": whole, "total": whole, "tokenization": timings.tokenise}
        seconds |= {"queue": timings.queue, "inference": timings.model}
        complete = answer.with_timings(timings).with_warnings(
            [*(warnings_of(result.truncated, self._field_warnings) or ()), *warnings]
        )
        return complete.with_headers(
            **{f"x_{part}_time": str(round(each * 1e3)) for part, each in seconds.items()},
            x_compute_type=self._device,
            x_compute_characters=str(self._characters),
            x_compute_tokens=str(result.usage.prompt_tokens),
        )
