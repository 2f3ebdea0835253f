"""Clients' connections: who is let in, how long each may stay, and which one is closed when there are too
many. aiohttp speaks HTTP on them. Limits hold for headers, bodies, reading an answer and idling, not while
the server works. Every connection that the server ends is counted, and clients that still listen get a 408 or
503."""

import asyncio
import errno
import ipaddress
import logging
import re
import socket
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from fcntl import ioctl
from functools import partial
from http import HTTPStatus
from socket import SO_LINGER, SOL_SOCKET
from struct import Struct
from termios import TIOCOUTQ
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from maxsimd.api.answer import INTERNAL_ERROR, Answer, ApiError, error_answer
from maxsimd.api.config import ServerConfig
from maxsimd.api.http.sockets import BACKLOG
from maxsimd.api.logs import SeldomLogger
from maxsimd.api.state import ServerMetrics

# At most this many at a time are told before they are closed.
_MOST_LEAVING = 8
# A client may be silent so long before it counts as waiting.
_NEW_SECONDS = 1.0


class Phase(Enum):
    """The next event that a connection waits for."""

    IDLE = "the next request"
    HEADERS = "the rest of a request's headers, or the first of them"
    BODY = "the rest of a body"
    ANSWERING = "the server"
    SENDING = "a client to read its answer"
    LINGERING = "the rest of a body that was answered already"
    CLOSING = "what is left of the last answer to be read"


_WAITING = frozenset({Phase.IDLE, Phase.HEADERS, Phase.LINGERING, Phase.CLOSING})
_TRANSFERRING = frozenset({Phase.BODY, Phase.SENDING})


class ConnectionTable:
    """All open connections. At the limit, the table closes one that the server does not work for: the one
    that has been idle longest, or else the one with the longest transfer."""

    def __init__(self, config: ServerConfig, most: int, metrics: ServerMetrics) -> None:
        self.config = config
        self.most = most
        self.metrics = metrics
        self._open: set[Connection] = set()
        # When they entered their phases, oldest first.
        self._waiting: dict[Connection, float] = {}
        self._transferring: dict[Connection, float] = {}
        # Bytes of answers that are being read, oldest first.
        self._unread: dict[Connection, int] = {}
        self._leaving: set[Connection] = set()
        self._changed = asyncio.Event()
        metrics.connections.set_function(lambda: len(self._open))

    @property
    def is_full(self) -> bool:
        return len(self._open) - len(self._leaving) >= self.most

    def enter(self, connection: "Connection", phase: Phase) -> None:
        self._open.add(connection)
        self._waiting.pop(connection, None)
        self._transferring.pop(connection, None)
        if phase in _WAITING:
            self._waiting[connection] = time.monotonic()
        elif phase in _TRANSFERRING:
            self._transferring[connection] = time.monotonic()
        self._changed.set()

    def leave(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._leaving.discard(connection)
        self._waiting.pop(connection, None)
        self._transferring.pop(connection, None)
        self._changed.set()

    def evict(self) -> bool:
        """Ends a connection to make room, if the server works for none of them."""
        waiting, since = next(iter(self._waiting.items()), (None, _NEVER))
        transferring, begun = next(iter(self._transferring.items()), (None, _NEVER))
        is_due = time.monotonic() - since > _NEW_SECONDS
        chosen = waiting if is_due or since <= begun else transferring
        if chosen is None:
            return False
        is_told = len(self._leaving) < _MOST_LEAVING
        self._leaving.add(chosen)
        chosen.evict(is_told)
        return True

    @contextmanager
    def sending(self, connection: "Connection", size: int) -> Iterator[None]:
        """Holds `size` bytes of an answer while it is written. Above the limit, ends the slowest readers."""
        self._unread[connection] = size
        try:
            while sum(self._unread.values()) > self.config.max_bodies_mb << 20:
                slowest = next(iter(self._unread))
                if slowest is connection:
                    break
                del self._unread[slowest]
                slowest.evict(False)
            yield
        finally:
            self._unread.pop(connection, None)

    async def until_quiet(self) -> None:
        """Returns when every answer has been handed to the system."""
        while len(self._waiting) < len(self._open):
            self._changed.clear()
            await self._changed.wait()

    async def until_empty(self) -> None:
        while self._open:
            self._changed.clear()
            await self._changed.wait()


SERVER = "maxsimd"
# Limits in bytes. They differ, so that errors tell which was exceeded.
LONGEST_LINE, LONGEST_HEADER, MOST_HEADERS = 8190, 16_380, 128
PIECE = 64 * 1024
_TWICE = re.compile(r"Duplicate '([A-Za-z-]{1,40})' header found\.")


def as_response(answer: Answer, request: web.BaseRequest | None = None) -> web.Response:
    headers = {**answer.headers, "Server": SERVER}
    body: Any = answer.body
    if request is not None and request.secure and len(body) > PIECE:
        headers["Content-Length"] = str(len(body))
        body = _in_pieces(body)
    return web.Response(status=answer.status, headers=headers, body=body)


async def _in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """Behind TLS, the event loop notices only between writes that a client does not read."""
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]
        await asyncio.sleep(0)


def as_bytes(answer: Answer) -> bytes:
    """An answer for clients without a readable request; the connection is closed after it."""
    headers = {**answer.headers, "Server": SERVER, "Content-Length": str(len(answer.body))}
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body


def _too_many_connections() -> ApiError:
    message = "the server has no connection left; try again shortly, or raise --limit max_connections"
    return ApiError(503, message, retry_after=1)


def _too_slow(part: str, option: str) -> ApiError:
    message = f"the {part} took too long to arrive; send faster, or raise {option}"
    return ApiError(408, message)


def malformed_request(error: HttpProcessingError | None) -> ApiError:
    """The error for bytes that are not HTTP/1.1, without repeating them."""
    if isinstance(error, LineTooLong):
        if error.args[1] == LONGEST_LINE:
            return ApiError(414, f"the path and query are too long; at most {LONGEST_LINE} bytes are taken")
        return ApiError(431, f"a header is too long; at most {LONGEST_HEADER} bytes are taken")
    if isinstance(error, BadHttpMethod) and error.message == "Received HTTPS traffic on an HTTP port":
        return ApiError(400, "HTTP is spoken here, not HTTPS; use http://")
    if error is not None and error.message == "Too many headers received":
        return ApiError(431, f"there are too many headers; at most {MOST_HEADERS} are taken")
    twice = _TWICE.fullmatch(error.message) if error is not None else None
    if twice:
        return ApiError(400, f"there are two {twice[1]} headers; send one")
    return ApiError(
        400, "this is not HTTP/1.1; check method, path, Host, Content-Length and Transfer-Encoding"
    )


log = logging.getLogger("maxsimd.http")

# The answer to an incomplete body is lost if the connection closes before the client has sent the rest.
_LINGERING_SECONDS = 10.0
# Timers run before waiting data is read, so a busy event loop looks twice.
_SECOND_LOOK_SECONDS = 0.02
_NEVER = float("inf")
_INT = Struct("i")
# The server never switches protocols. Rename the header, because aiohttp's parser drops requests that are
# pipelined behind it.
_UPGRADE, _NO_UPGRADE = re.compile(rb"\r\n(?i:upgrade):"), b"\r\nxpgrade:"
# The parser may keep bytes behind 32 requests. Fewer than this are parsed for certain.
_MANY_REQUESTS = 16
# The lines around chunks may take a byte for so many of the body, beside a piece that is free.
_BYTES_A_FRAME = 2
# At the end of a chunked body, behind its trailers where it has any.
_END_OF_CHUNKS = b"\r\n\r\n"
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_RESET = Struct("ii").pack(1, 0)


class Connection(web.RequestHandler):
    """One client's connection. `begin` is called with each of its requests, before it is answered."""

    def __init__(self, server: web.Server, table: ConnectionTable, loop: asyncio.AbstractEventLoop) -> None:
        config = table.config
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=2 * (config.idle_seconds + config.header_seconds),
            lingering_time=min(_LINGERING_SECONDS, config.transfer_seconds),
            max_line_size=LONGEST_LINE,
            max_field_size=LONGEST_HEADER,
            max_headers=MOST_HEADERS,
            access_log=None,  # type: ignore[arg-type]
            # The application decompresses: aiohttp accepts truncated bodies.
            auto_decompress=False,
            logger=log,
        )
        self._table = table
        self._config = config
        self._wire: asyncio.Transport | None = None
        self._body: StreamReader | None = None
        # The body of the last parsed request, and the parser's last bytes.
        self._parsed: StreamReader = EMPTY_PAYLOAD
        self._last_bytes = b""
        self._held_back = False
        # Bytes received since that body began, and whether it was refused for its chunks.
        self._body_received = 0
        self._has_tiny_chunks = False
        self._phase = Phase.HEADERS
        self._deadline = _NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._looked = False
        self._received = 0
        # Bytes received, or still to be sent, when the current measurement began.
        self._mark = 0
        self._is_gone = False
        # The TLS handshake.
        self.opening: asyncio.Task[Any] | None = None
        table.enter(self, Phase.HEADERS)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast("asyncio.Transport", transport)
        if self._is_gone:
            self._wire.abort()
            return
        self._wire.set_write_buffer_limits(high=PIECE)
        super().connection_made(transport)
        self._enter(Phase.HEADERS, self._config.header_seconds)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.forget()
        super().connection_lost(exc)

    def forget(self) -> None:
        """Removes a connection that has ended or could not be opened."""
        self._is_gone = True
        self._set_timer(_NEVER)
        self._table.leave(self)

    def data_received(self, data: bytes) -> None:
        # aiohttp also calls this without data, to parse what it holds back.
        if data:
            self._received += len(data)
            if self._phase is Phase.IDLE:
                self._enter(Phase.HEADERS, self._config.header_seconds)
        for start in range(0, max(1, len(data)), PIECE):
            if not self._has_tiny_chunks:
                self._parse(data[start : start + PIECE])
        if self._has_tiny_chunks and data.endswith(_END_OF_CHUNKS):
            self._refuse_chunks()

    def _parse(self, data: bytes) -> None:
        super().data_received(self._without_upgrade(data))
        self._body_received += len(data)
        if self._messages:
            if self._parsed is not self._messages[-1][1]:
                self._parsed, self._body_received = self._messages[-1][1], 0
            self._held_back |= len(self._messages) >= _MANY_REQUESTS
        if self._phase is Phase.BODY and self._is_malformed():
            self._fail_body(malformed_request(None))
        # Each chunk takes a microsecond, however small.
        body = self._parsed.total_bytes
        if not self._parsed.is_eof() and self._body_received > body + body // _BYTES_A_FRAME + PIECE:
            self._has_tiny_chunks = True
            # Clients that are still sending would not see an answer.
            self._loop.call_later(_LINGERING_SECONDS, self._refuse_chunks)

    def _refuse_chunks(self) -> None:
        """Fails the body, whose rest is not parsed."""
        if not self._is_gone and self._parsed.exception() is None:
            failure = ApiError(400, "the body comes in tiny chunks; send at least 16 bytes in each")
            if self._phase is Phase.BODY:
                self._fail_body(failure)
            else:
                self._parsed.set_exception(failure)

    def _without_upgrade(self, data: bytes) -> bytes:
        """Renames `Upgrade` in the head of a request, never in a body. Skips this if the parser may hold back
        bytes, or if the end of the head is not certain."""
        before = self._last_bytes
        self._last_bytes = (before + data[-2:])[-2:]
        if self._held_back or not self._parsed.is_eof():
            return data
        end = _END_OF_HEAD.search(before + data)
        if end is None:
            return _UPGRADE.sub(_NO_UPGRADE, data)
        rest = max(0, end.start() - len(before))
        return _UPGRADE.sub(_NO_UPGRADE, data[:rest]) + data[rest:]

    def begin(self, request: web.BaseRequest) -> None:
        body = self._body = request.content
        if body.is_eof():
            self._enter(Phase.ANSWERING, None)
            return
        self._mark = self._received
        self._enter(Phase.BODY, self._config.transfer_seconds)
        if self._is_malformed():
            self._fail_body(malformed_request(None))
        else:
            body.on_eof(self._body_ended)

    def _body_ended(self) -> None:
        if self._phase is Phase.BODY:
            self._enter(Phase.ANSWERING, None)
        elif self._phase is Phase.LINGERING:
            self._enter(Phase.IDLE, self._config.idle_seconds)

    def _is_malformed(self) -> bool:
        """Whether the last bytes are not HTTP. aiohttp would tell only the reader of the next request."""
        return bool(self._messages) and isinstance(self._messages[-1][0], _ErrInfo)

    def _fail_body(self, failure: ApiError) -> None:
        """Raises an error in the reader of the body; the client gets it."""
        assert self._body is not None
        self._enter(Phase.ANSWERING, None)
        self._body.set_exception(failure)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if request._message.upgrade:
            # The header came in two parts and was not renamed. The parser has dropped the requests behind it,
            # so the client must repeat them.
            resp.force_close()
        if self._phase is not Phase.CLOSING:
            self._enter(Phase.ANSWERING, None)
            # The client may not have read earlier answers.
            if self._paused:
                self._begin_sending()
        try:
            with self._table.sending(self, resp.content_length or 0):
                return await super().finish_response(request, resp, start_time)
        finally:
            if self._phase is not Phase.CLOSING:
                if not request.content.is_eof():
                    self._enter(Phase.LINGERING, _LINGERING_SECONDS + 1)
                elif resp.keep_alive:
                    self._enter(Phase.IDLE, self._config.idle_seconds)
                else:
                    self._enter(Phase.CLOSING, self._config.transfer_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._phase is Phase.ANSWERING:
            self._begin_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._phase is Phase.SENDING:
            self._enter(Phase.ANSWERING, None)

    def _begin_sending(self) -> None:
        self._mark = self._unsent()
        self._enter(Phase.SENDING, self._config.transfer_seconds)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers malformed requests and unexpected errors."""
        if isinstance(exc, ConnectionError):
            # The client has gone away.
            raise exc
        request_id = uuid.uuid4().hex
        if isinstance(exc, HttpProcessingError):
            failure = malformed_request(exc)
            log.debug("malformed request: %d (%s) id=%s", failure.status, type(exc).__name__, request_id)
        else:
            failure = ApiError(500, INTERNAL_ERROR)
            log.error("request %s failed", request_id, exc_info=exc)
        self._table.metrics.requests.labels("unknown", str(failure.status)).inc()
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer has been sent already")
        answer = error_answer(failure).completed(request_id, 0.0, {})
        response = as_response(answer)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        # This error of the body has been answered; aiohttp meets it again when it looks for the body's end.
        if self._body is None or self._body.exception() is None:
            super().log_exception(*args, **kw)

    def refuse(self, failure: ApiError) -> None:
        """Sends an error without a request to answer, and closes."""
        answer = error_answer(failure).completed(uuid.uuid4().hex, 0.0, {})
        self._table.metrics.requests.labels("unknown", str(failure.status)).inc()
        if self._wire is not None and not self._wire.is_closing():
            self._wire.write(as_bytes(answer))
        self._end()

    def evict(self, is_told: bool) -> None:
        """Makes room for others: at once, or soon if there is a request and its client `is_told`."""
        self._count("evicted")
        if is_told and self._phase is Phase.BODY:
            self._fail_body(_too_many_connections())
        else:
            self._abort()
            # Frees the descriptor before the next connection is accepted.
            self.forget()

    def _enter(self, phase: Phase, seconds: float | None) -> None:
        if self._is_gone:
            return
        self._phase = phase
        self._looked = False
        self._table.enter(self, phase)
        self._deadline = _NEVER if seconds is None else self._loop.time() + seconds
        # A timer that is too early sets itself again, which costs less than moving it with each request.
        if self._timer is None or self._deadline < self._timer.when():
            self._set_timer(self._deadline)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when == _NEVER else self._loop.call_at(when, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._loop.time() < self._deadline:
            self._set_timer(self._deadline)
        elif not self._looked:
            self._looked = True
            self._set_timer(self._loop.time() + _SECOND_LOOK_SECONDS)
        else:
            self._looked = False
            self._handle_timeout()

    def _handle_timeout(self) -> None:
        match self._phase:
            case Phase.BODY:
                if self._is_fast_enough(self._received - self._mark):
                    self._mark = self._received
                    self._enter(Phase.BODY, self._config.transfer_seconds)
                else:
                    self._count("slow_body")
                    self._fail_body(_too_slow("body", "--limit transfer_seconds"))
            case Phase.SENDING:
                unsent = self._unsent()
                if self._is_fast_enough(self._mark - unsent):
                    self._mark = unsent
                    self._enter(Phase.SENDING, self._config.transfer_seconds)
                else:
                    self._count("slow_reader")
                    self._abort()
            case Phase.HEADERS if self._received:
                self._count("slow_headers")
                self.refuse(_too_slow("headers", "--limit header_seconds"))
            case Phase.CLOSING:
                self._count("slow_reader")
                self._abort()
            case _:
                self._count("idle")
                self._end()

    def _is_fast_enough(self, num_bytes: int) -> bool:
        least = self._config.min_bytes_per_second * self._config.transfer_seconds
        return num_bytes >= max(1, least)

    def _unsent(self) -> int:
        """Bytes that the client has not got, in our buffers and in the system's. The system takes more only
        when a good part of its own has gone."""
        assert self._wire is not None
        unsent = bytearray(_INT.size)
        with suppress(OSError, AttributeError):
            ioctl(self._wire.get_extra_info("socket").fileno(), TIOCOUTQ, unsent)
        return self._wire.get_write_buffer_size() + int(_INT.unpack(unsent)[0])

    def _end(self) -> None:
        """Closes once everything is sent, but does not wait long for that."""
        self._enter(Phase.CLOSING, self._config.transfer_seconds)
        self.force_close()

    def _abort(self) -> None:
        self._enter(Phase.CLOSING, None)
        self.force_close()
        if self._wire is not None:
            if self._wire.get_write_buffer_size() > 0:
                # The answer is incomplete; do not let the system hold its part.
                with suppress(OSError, AttributeError):
                    self._wire.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
            self._wire.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def _count(self, reason: str) -> None:
        self._table.metrics.cut_connections.labels(reason).inc()


serve_log = logging.getLogger("maxsimd.serve")

# Connections accepted before other tasks run.
_AT_ONCE = 8
# Pause in accepting when the system has no room.
_REST_SECONDS = 0.1
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """Accepts connections. The event loop's own server closes new ones silently if the process has no
    descriptor left. Used from the event loop's thread alone."""

    def __init__(self, server: web.Server, table: ConnectionTable, tls: ssl.SSLContext | None) -> None:
        self._server = server
        self._table = table
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        # The event loop keeps only weak references.
        self._opening: set[asyncio.Task[Any]] = set()
        self._no_room = SeldomLogger(serve_log)
        self._full = SeldomLogger(serve_log)

    def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accepts on listening sockets, which are closed with this. Other processes may do so too."""
        self._sockets = [*sockets]
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    @property
    def port(self) -> int:
        """The port, or 0 before the start."""
        return int(self._sockets[0].getsockname()[1]) if self._sockets else 0

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine can connect."""
        addresses = (listening.getsockname()[0].partition("%")[0] for listening in self._sockets)
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)

    def close(self) -> None:
        """Accepts the connections that have arrived by now, and no more."""
        for listening in self._sockets:
            if self._loop.remove_reader(listening):
                for _ in range(BACKLOG // _AT_ONCE):
                    if not self._accept(listening):
                        break
                self._loop.remove_reader(listening)
            listening.close()
        self._sockets.clear()

    def _accept(self, listening: socket.socket) -> bool:
        """Accepts some connections; returns whether there may be more."""
        for _ in range(_AT_ONCE):
            try:
                arrived, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                # Other errors are the client's, which has left again.
                if error.errno in _NO_ROOM:
                    self._pause_accepting(listening, error)
                    return False
                continue
            self._admit(arrived)
        return True

    def _pause_accepting(self, listening: socket.socket, error: OSError) -> None:
        """Makes room, and waits a moment for it."""
        for _ in range(_AT_ONCE):
            self._table.evict()
        self._no_room.warning(
            "cannot accept connections: %s; raise the limit on descriptors (ulimit -n), "
            "or lower --limit max_connections",
            error.strerror,
        )
        self._loop.remove_reader(listening)
        self._loop.call_later(_REST_SECONDS, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _admit(self, arrived: socket.socket) -> None:
        arrived.setblocking(False)
        if self._table.is_full:
            self._full.warning(
                "%d connections are open, the most of --limit max_connections", self._table.most
            )
            if not self._table.evict():
                self._refuse(arrived)
                return
        connection = Connection(self._server, self._table, self._loop)
        config = self._table.config
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(
                lambda: connection,
                arrived,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else config.header_seconds,
                ssl_shutdown_timeout=None if self._tls is None else config.transfer_seconds,
            )
        )
        if self._tls is not None:
            connection.opening = opening
        self._opening.add(opening)
        opening.add_done_callback(partial(self._opened, connection, arrived))

    def _opened(self, connection: Connection, arrived: socket.socket, opening: "asyncio.Task[Any]") -> None:
        self._opening.discard(opening)
        connection.opening = None
        if opening.cancelled() or opening.exception() is not None:
            # The client has left, speaks no TLS, was too slow, or had to make room.
            serve_log.debug("a connection could not be opened")
            connection.forget()
            arrived.close()

    def _refuse(self, arrived: socket.socket) -> None:
        self._table.metrics.cut_connections.labels("refused").inc()
        if self._tls is None:
            answer = error_answer(_too_many_connections()).completed(uuid.uuid4().hex, 0.0, {})
            with suppress(OSError):
                arrived.send(as_bytes(answer))
        arrived.close()
