"""The adapter between aiohttp and the handlers, for what only a web server can do: bodies that arrive in
pieces, connections that close while the server drains, and cancelling a handler when its client goes away."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.web_protocol import RequestPayloadError
from aiohttp.web_urldispatcher import UrlMappingMatchInfo

from maxsimd.api.answer import Answer, ApiError, error_answer
from maxsimd.api.config import ServerConfig
from maxsimd.api.handlers import handle, watch
from maxsimd.api.handlers.bodies import decompressed, encoding_of, refusal, unreadable_body
from maxsimd.api.http.connections import SERVER, Connection, as_response
from maxsimd.api.state import FleetView, ServerState, Serving

STATE = web.AppKey("state", ServerState)


def build_app(engine: Serving, config: ServerConfig, fleet: FleetView | None = None) -> web.Application:
    """The application around an engine, which may be started later."""
    app = web.Application(middlewares=[_answer])
    app._router = _OneRoute()
    app[STATE] = ServerState(engine, config, fleet)
    app.cleanup_ctx.append(_watch)
    return app


class _OneRoute(web.UrlDispatcher):
    """One route for every target, including `OPTIONS *` and the empty path; the middleware answers. aiohttp
    would answer some targets without a route before any middleware."""

    def __init__(self) -> None:
        super().__init__()
        self._route = self.add_route("*", "/", _unused, expect_handler=_expect)

    async def resolve(self, request: web.Request) -> UrlMappingMatchInfo:
        return UrlMappingMatchInfo({}, self._route)


@web.middleware
async def _answer(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    state = request.app[STATE]
    connection = request.protocol
    # Tests use aiohttp's own connections.
    if isinstance(connection, Connection):
        if request.transport is None:
            # The connection was closed to make room. aiohttp sends this response nowhere.
            return web.Response()
        if request.version not in (HttpVersion10, HttpVersion11):
            connection.refuse(ApiError(400, "only HTTP/1.1 and HTTP/1.0 are spoken here"))
            return web.Response()
        connection.begin(request)
    path = request.rel_url.path_safe
    sink = _ResponseSink(request)
    answer = await handle(state, request.method, path, request.headers, _body(request), sink)
    response = sink.response or as_response(answer, request)
    # The next request's beginning is unknown after a body that cannot be read on, and a client that waits to
    # send its body may not send it any more.
    is_unread = "Expect" in request.headers and not request.content.is_eof()
    if state.draining or state.closing or is_unread or request.content.exception() is not None:
        response.force_close()
    return response


class _ResponseSink:
    """Sends an answer's parts as they come. `response` is set once it has begun."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    async def begin(self, answer: Answer) -> None:
        self.response = web.StreamResponse(status=answer.status, headers={**answer.headers, "Server": SERVER})
        state = self._request.app[STATE]
        if state.draining or state.closing:
            self.response.force_close()
        await self.response.prepare(self._request)

    async def send(self, part: bytes) -> None:
        assert self.response is not None
        await self.response.write(part)

    async def end(self) -> None:
        assert self.response is not None
        await self.response.write_eof()


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Tells clients that wait for it to send their body, unless the body is refused."""
    if request.version == HttpVersion11:
        if request.headers["Expect"].lower() != "100-continue":
            if isinstance(request.protocol, Connection):
                request.protocol.begin(request)
            failure = ApiError(417, "Expect can only be 100-continue; leave it out")
            response = as_response(error_answer(failure).completed(uuid.uuid4().hex, 0.0, {}))
            response.force_close()
            return response
        if refusal(request.headers, request.app[STATE].max_body_bytes) is not None:
            return None
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # This is not yet the answer.
        request.writer.output_size = 0
    return None


async def _unused(request: web.Request) -> web.StreamResponse:
    raise AssertionError("the middleware has answered")


async def _body(request: web.Request) -> AsyncIterator[bytes]:
    """The body as it arrives, decompressed. Raises ApiError for unsupported or wrong encodings."""
    # aiohttp decompresses on its own connections.
    encoding = encoding_of(request.headers) if isinstance(request.protocol, Connection) else None
    chunks = _chunks(request)
    async for chunk in chunks if encoding is None else decompressed(chunks, encoding):
        yield chunk


async def _chunks(request: web.Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.content.iter_any():
            yield chunk
    except RequestPayloadError as error:
        raise unreadable_body() from error


async def _watch(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    watcher = asyncio.create_task(watch(state))
    yield
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    if state.tracing is not None:
        await asyncio.to_thread(state.tracing.close)
    await state.media.close()
