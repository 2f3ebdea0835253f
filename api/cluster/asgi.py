"""The adapter between ASGI and the handlers, for servers that others start: Ray Serve's.

See the ASGI specification, https://asgi.readthedocs.io/en/latest/specs/www.html."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

from maxsimd.api.answer import Answer
from maxsimd.api.handlers import handle
from maxsimd.api.handlers.bodies import decompressed, encoding_of
from maxsimd.api.state import ServerState

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
# Serve gives every request an id, and sends it back itself.
_SENT_BY_SERVE = "x-request-id"


class AsgiAdapter:
    """Answers requests by the handlers. Whoever calls it cancels the call when the client goes away."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            # Starts and ends nothing: the state's maker does.
            message: Mapping[str, Any] = {"type": ""}
            while message["type"] != "lifespan.shutdown":
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        sink = _Sink(send)
        method = scope["method"]
        answer = await handle(self._state, method, _path(scope), headers, _body(headers, receive), sink)
        if not sink.has_begun:
            await send(_start(answer, len(answer.body)))
            await send({"type": "http.response.body", "body": b"" if method == "HEAD" else answer.body})


class _Sink:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def begin(self, answer: Answer) -> None:
        self.has_begun = True
        await self._send(_start(answer, None))

    async def send(self, part: bytes) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


def _start(answer: Answer, length: int | None) -> dict[str, Any]:
    headers = {name: value for name, value in answer.headers.items() if name.lower() != _SENT_BY_SERVE}
    if length is not None:
        headers["Content-Length"] = str(length)
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": answer.status, "headers": encoded}


def _headers(scope: Mapping[str, Any]) -> dict[str, str]:
    """By name in lower case; the first of several."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def _path(scope: Mapping[str, Any]) -> str:
    """The path behind the application's prefix, decoded but for %2F."""
    raw = scope.get("raw_path")
    if raw is None:
        path = str(scope["path"])
    else:
        written = raw.decode("latin-1").partition("?")[0]
        path = "%2F".join(unquote(part) for part in written.replace("%2f", "%2F").split("%2F"))
    prefix = scope.get("root_path", "").rstrip("/")
    return path.removeprefix(prefix) or "/" if f"{path}/".startswith(f"{prefix}/") else path


async def _body(headers: Mapping[str, str], receive: Receive) -> AsyncIterator[bytes]:
    """The decompressed body. Raises ApiError for an unknown encoding or wrong data."""
    encoding, chunks = encoding_of(headers), _chunks(receive)
    async for chunk in chunks if encoding is None else decompressed(chunks, encoding):
        yield chunk


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError("the client has gone away")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
