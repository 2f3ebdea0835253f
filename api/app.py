"""The adapter between aiohttp and the handlers: their answers as aiohttp's responses.

What aiohttp alone can do is done here: connections (one that a draining server answers on is closed), bodies
that arrive in pieces, and cancelling the handler when its client goes away. What a second adapter would have
to do again belongs to `handlers`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from maxsimd.api.config import ServerConfig
from maxsimd.api.failures import unreadable_body
from maxsimd.api.handlers import handle
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine

STATE = web.AppKey("state", ServerState)


def build_app(engine: Engine, config: ServerConfig) -> web.Application:
    """The application around an engine, which need not be started yet."""
    # One route takes all paths, and a middleware answers in its stead, as it also gets `OPTIONS *`.
    # Without the route aiohttp would first make an error of its own for every request.
    app = web.Application(middlewares=[_answer])
    app.router.add_route("*", "/{path:.*}", _unused)
    app[STATE] = ServerState(engine, config)
    app.cleanup_ctx.append(_watch_lag)
    return app


@web.middleware
async def _answer(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    state = request.app[STATE]
    path = request.rel_url.path_safe
    answer = await handle(state, request.method, path, request.headers, _chunks(request))
    response = web.Response(status=answer.status, headers=answer.headers, body=answer.body)
    if state.draining:
        response.force_close()
    return response


async def _unused(request: web.Request) -> web.StreamResponse:
    raise AssertionError("the middleware has answered")


async def _chunks(request: web.Request) -> AsyncIterator[bytes]:
    """The body as it arrives, decompressed."""
    try:
        async for chunk in request.content.iter_any():
            yield chunk
    except RequestPayloadError as error:
        raise unreadable_body() from error


async def _watch_lag(app: web.Application) -> AsyncIterator[None]:
    watcher = asyncio.create_task(app[STATE].metrics.watch_lag())
    yield
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
