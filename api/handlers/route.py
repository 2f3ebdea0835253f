"""Routes: what each takes and answers, and the way of a request through them to its handler."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from msgspec import UNSET

from maxsimd.api.answer import Answer, wire_answer
from maxsimd.api.handlers.bodies import Body, parse_body, read_body, wrong_bodies_refused
from maxsimd.api.models import Wanted
from maxsimd.api.reading import UnreadField, unread_fields, warnings_of
from maxsimd.api.state import ServerState, naming_lost_model
from maxsimd.api.wire import Warnings
from maxsimd.engine import (
    AddedDocuments,
    ClassifyResult,
    EmbedResult,
    LabelScores,
    RequestTimeoutError,
    RerankResult,
    ScoreResult,
    SparseEmbedResult,
    TokenClassifyResult,
    TokenEmbedResult,
)
from maxsimd.engine.requests import DocumentDigest

T = TypeVar("T")
R = TypeVar("R")
Work: TypeAlias = Callable[[ServerState, Body], Awaitable[Answer]]
Result: TypeAlias = (
    AddedDocuments
    | ScoreResult
    | RerankResult
    | EmbedResult
    | TokenEmbedResult
    | SparseEmbedResult
    | ClassifyResult
    | LabelScores
    | TokenClassifyResult
)

# Time beyond the timeout for work beside the engine.
_LATE_SECONDS = 0.5


class Group(StrEnum):
    """The groups of routes in /openapi.json and /docs, in their order."""

    RANK = "Rank and score"
    EMBED = "Embed"
    CLASSIFY = "Classify"
    TOKENS = "Tokens"
    BATCHES = "Batch jobs"
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
    have), its handler, which also gets these texts, and the kind of model that it needs if it names none."""

    kind: type[T]
    read: Callable[[T, int], R]
    handler: Callable[[ServerState, T, R], Awaitable[Answer]]
    wanted: Wanted | Callable[[ServerState, Any], Wanted]

    def model_wanted(self, state: ServerState, request: Any) -> Wanted:
        return self.wanted if isinstance(self.wanted, Wanted) else self.wanted(state, request)


def no_texts(request: Any, most: int) -> None:
    """Reads nothing, in forms without texts."""


def get(path: str, handler: Callable[[ServerState], Awaitable[Answer]], *answers: Any, shown: Shown) -> Route:
    return Route(path, ("GET", "HEAD"), lambda state, body: handler(state), shown, answers=answers)


def post(
    paths: Iterable[str], form: Form[T, R], shown: Shown, *answers: Any, kinds: tuple[Any, ...] = ()
) -> list[Route]:
    """Routes with a body of this form. `kinds` are the types that a body of any fields may have."""
    kinds = kinds or (form.kind,)
    return [Route(path, ("POST",), _with_body(path, form), shown, kinds, answers) for path in paths]


def _with_body(path: str, form: Form[T, R]) -> Work:
    # msgspec prepares a type when it is first used, and crashes if two threads do that at a time.
    msgspec.json.Decoder(form.kind)

    async def work(state: ServerState, body: Body) -> Answer:
        state.check_ready()
        if form.wanted is not Wanted.ANYTHING:  # the model will run
            state.engine.check_rate(state.tenant)
        with ExitStack() as until_answered:
            held = until_answered.enter_context(state.held)
            whole = await read_body(state, body, held)
            request, found, unread = await parse_body(state, whole, held, form.kind, form.read)
            del whole
            state = state.warning_about([*unread, *state.unread_name(model_of(request))], path)
            wanted = form.model_wanted(state, request)
            serving = state.serving(model_of(request), wanted)
            if not wanted.is_of_vectors:
                serving.check_name_is_plain()
            until_answered.enter_context(naming_lost_model(state.models, serving.called))
            answer = await _handled(form, serving, request, found)
            return answer if answer.lines is None else replace(answer, within=until_answered.pop_all())

    return work


async def _handled(form: Form[T, R], state: ServerState, request: T, found: R) -> Answer:
    async with _timeout_of(request):
        if found is not None and state.reads_pictures:
            found = await state.media.filled(found, state.held)
        state.note_documents(_num_documents(found))
        if _has_digests(found):
            state.check_owner_of_digests()
        answer = await form.handler(state, request, found)
    return answer.with_field_warnings(state.field_warnings)


def _num_documents(found: Any) -> int:
    """The documents or texts of a request, without its queries, which come first."""
    parts = reversed(found) if isinstance(found, tuple) else [found]
    documents = next((part for part in parts if isinstance(part, list)), None)
    return int(found is not None) if documents is None else len(documents)


def _has_digests(found: Any) -> bool:
    """Whether the documents of a request, which come last, are named by digests."""
    documents = found[-1] if isinstance(found, tuple) else None
    return isinstance(documents, list) and DocumentDigest in {*map(type, documents)}


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


Fields = dict[str, Any]


def field_of(request: msgspec.Struct | Fields, name: str) -> Any:
    return request.get(name) if isinstance(request, dict) else getattr(request, name)


def model_of(request: Any) -> str | None:
    named = field_of(request, "model")
    return named if isinstance(named, str) else None  # other values are refused later


async def answered_as(form: Form[T, R], state: ServerState, fields: Fields, path: str) -> Answer:
    """Answers fields as a request of one form, on the route `path`."""
    most = state.config.max_documents

    def read() -> tuple[T, R, list[UnreadField]]:
        request = msgspec.convert(fields, type=form.kind, strict=False)
        return request, form.read(request, most), unread_fields(cast("msgspec.Struct", request), fields)

    size = sum(len(value) for value in fields.values() if isinstance(value, str | list))
    with wrong_bodies_refused():
        request, found, unread = await state.engine.in_thread(read, size)
    return await _handled(form, state.warning_about(unread, path), request, found)


async def answer_of(
    state: ServerState,
    body: msgspec.Struct,
    result: Result,
    build: Callable[[Warnings], Any],
    items: int,
    characters: int = 0,
    *,
    tei: Mapping[str, str] | None = None,
    more_warnings: Iterable[str] = (),
) -> Answer:
    """Answers with the wire type that `build` makes with the warnings; see `wire_answer`. With `tei` (see
    `tei_headers`) it has text-embeddings-inference's times too, in whole milliseconds."""
    state.note_used(result)
    warnings = warnings_of(result.truncated, state.field_warnings, body if tei is None else None)
    warnings = [*(warnings or ()), *more_warnings] or UNSET
    answer = await wire_answer(lambda: build(warnings), items, characters)
    answer = answer.with_timings(result.timings).with_warnings(warnings)
    if tei is None:
        return answer
    timings = result.timings
    seconds = {"compute": timings.whole, "total": timings.whole, "tokenization": timings.tokenise}
    seconds |= {"queue": timings.queue, "inference": timings.model}
    times = {f"x_{part}_time": str(round(each * 1e3)) for part, each in seconds.items()}
    return answer.with_headers(**tei, **times, x_compute_tokens=str(result.usage.prompt_tokens))


def tei_headers(state: ServerState, texts: Iterable[object]) -> Mapping[str, str]:
    """text-embeddings-inference's headers on the work for `texts`. Make them before the engine runs, which
    may die meanwhile."""
    return {
        "x_compute_type": "cpu" if state.engine.facts.device == "cpu" else "gpu",
        "x_compute_characters": str(sum(len(text) for text in texts if isinstance(text, str))),
    }
