"""What a route is, and how the body of one that takes a wire type is read and checked."""

from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec

from maxsimd.api.answer import Answer
from maxsimd.api.failures import body_not_unicode, body_too_large
from maxsimd.api.state import ServerState

T = TypeVar("T")
# A request's body as it arrives.
Body: TypeAlias = AsyncIterable[bytes]
Work: TypeAlias = Callable[[ServerState, Body], Awaitable[Answer]]

# Bodies of more bytes than this are parsed in the thread pool, so that the event loop goes on.
LARGE_BODY = 64 * 1024


@dataclass(frozen=True, slots=True)
class Route:
    """A path with the methods that it takes, and what does the work."""

    path: str
    methods: tuple[str, ...]
    work: Work


def get(path: str, handler: Callable[[ServerState], Awaitable[Answer]]) -> Route:
    return Route(path, ("GET", "HEAD"), _without_body(handler))


def delete(path: str, handler: Callable[[ServerState], Awaitable[Answer]]) -> Route:
    return Route(path, ("DELETE",), _without_body(handler))


def post(path: str, kind: type[T], handler: Callable[[ServerState, T], Awaitable[Answer]]) -> Route:
    """A route whose body is a wire type. It takes requests only while the server is ready."""

    async def work(state: ServerState, body: Body) -> Answer:
        state.check_ready()
        request = await _parse(state, await _read(state, body), kind)
        state.check_model(getattr(request, "model", None))
        return await handler(state, request)

    return Route(path, ("POST",), work)


def _without_body(handler: Callable[[ServerState], Awaitable[Answer]]) -> Work:
    async def work(state: ServerState, body: Body) -> Answer:
        return await handler(state)

    return work


async def _read(state: ServerState, body: Body) -> bytearray:
    """The whole body, unless it is larger than the server allows."""
    most = state.config.max_body_mb * 1024 * 1024
    read = bytearray()
    async for chunk in body:
        read += chunk
        if len(read) > most:
            raise body_too_large()
    return read


async def _parse(state: ServerState, body: bytearray, kind: type[T]) -> T:
    try:
        if len(body) > LARGE_BODY:
            return await state.engine.in_thread(lambda: msgspec.json.decode(body, type=kind), len(body))
        return msgspec.json.decode(body, type=kind)
    except UnicodeDecodeError as error:
        raise body_not_unicode(error.reason) from error
