"""The connections of clients, and how long each may stay: for headers, for a body, for reading an answer, and
for nothing. aiohttp speaks HTTP on them; what it does not limit is limited here.

No limit applies while the server works on a request. Whatever ends a connection is counted; where a client
can still be told, it is (408).
"""

import asyncio
import logging
import re
import uuid
from contextlib import suppress
from fcntl import ioctl
from socket import SO_LINGER, SOL_SOCKET
from struct import Struct
from termios import TIOCOUTQ
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from maxsimd.api.connection_table import ConnectionTable, Phase
from maxsimd.api.failures import ApiError, error_answer, internal_error, too_many_connections, too_slow
from maxsimd.api.responses import (
    LONGEST_HEADER,
    LONGEST_LINE,
    MOST_HEADERS,
    PIECE,
    as_bytes,
    as_response,
    malformed_request,
)

log = logging.getLogger("maxsimd.http")

# An answer to a body that is not yet complete is lost if the connection is closed before the client has sent
# the rest.
_LINGERING_SECONDS = 10.0
# Timers run before what has arrived meanwhile is read: an event loop that was busy looks twice.
_SECOND_LOOK_SECONDS = 0.02
_NEVER = float("inf")
_INT = Struct("i")
# The server never switches protocols. Rename the header, because aiohttp's parser drops requests that are
# pipelined behind it.
_UPGRADE, _NO_UPGRADE = re.compile(rb"\r\n(?i:upgrade):"), b"\r\nxpgrade:"
# A parser that stops at 32 requests keeps the bytes behind them. Fewer than this are certain to be parsed.
_MANY_REQUESTS = 16
_END_OF_HEAD = re.compile(rb"\n\r?\n")
# For SO_LINGER: nothing is sent any more.
_RESET = Struct("ii").pack(1, 0)


class Connection(web.RequestHandler):
    """One client's connection. `begin` is called with each of its requests, before it is answered."""

    def __init__(self, server: web.Server, table: ConnectionTable, loop: asyncio.AbstractEventLoop) -> None:
        config = table.config
        super().__init__(
            server,
            loop=loop,
            # Only a guard behind our own.
            keepalive_timeout=2 * (config.idle_seconds + config.header_seconds),
            lingering_time=min(_LINGERING_SECONDS, config.transfer_seconds),
            max_line_size=LONGEST_LINE,
            max_field_size=LONGEST_HEADER,
            max_headers=MOST_HEADERS,
            access_log=None,  # type: ignore[arg-type]
            # That is the application's: aiohttp takes a body that ends too early for whole.
            auto_decompress=False,
            logger=log,
        )
        self._table = table
        self._config = config
        self._wire: asyncio.Transport | None = None
        self._body: StreamReader | None = None
        # The body of the last request that the parser has found, and the last bytes that it was given.
        self._parsed: StreamReader = EMPTY_PAYLOAD
        self._last_bytes = b""
        # Whether the parser may have kept bytes for later.
        self._held_back = False
        self._phase = Phase.HEADERS
        self._deadline = _NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._looked = False
        self._received = 0
        # What a transfer is measured from: bytes received, or bytes still to be sent.
        self._mark = 0
        self._is_gone = False
        # Shakes hands, where there is TLS.
        self.opening: asyncio.Task[Any] | None = None
        table.enter(self, Phase.HEADERS)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast("asyncio.Transport", transport)
        if self._is_gone:
            self._wire.abort()
            return
        # The default is eight times as much behind TLS.
        self._wire.set_write_buffer_limits(high=PIECE)
        super().connection_made(transport)
        self._enter(Phase.HEADERS, self._config.header_seconds)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.forget()
        super().connection_lost(exc)

    def forget(self) -> None:
        """Called once there is no connection any more, or if it could not be opened."""
        self._is_gone = True
        self._set_timer(_NEVER)
        self._table.leave(self)

    def data_received(self, data: bytes) -> None:
        # aiohttp also calls this without data, to have what it holds back parsed.
        if data:
            self._received += len(data)
            if self._phase is Phase.IDLE:
                self._enter(Phase.HEADERS, self._config.header_seconds)
        super().data_received(self._without_upgrade(data))
        if self._messages:
            self._parsed = self._messages[-1][1]
            self._held_back |= len(self._messages) >= _MANY_REQUESTS
        if self._phase is Phase.BODY and self._is_malformed():
            self._fail_body(malformed_request(None))

    def _without_upgrade(self, data: bytes) -> bytes:
        """Renames `Upgrade` in the head of a request, never in a body. Leaves it if the parser may hold back
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
        """Whether what came last is not HTTP. aiohttp would tell only those who ask for the next request."""
        return bool(self._messages) and isinstance(self._messages[-1][0], _ErrInfo)

    def _fail_body(self, failure: ApiError) -> None:
        """Has the reader of the body raise an error, which the client is told."""
        assert self._body is not None
        self._enter(Phase.ANSWERING, None)
        self._body.set_exception(failure)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if request._message.upgrade:
            # The header was not renamed, as when it came in two parts. The parser has dropped the requests
            # behind it, so the client must repeat them.
            resp.force_close()
        if self._phase is not Phase.CLOSING:
            self._enter(Phase.ANSWERING, None)
            # The client may not have read the answers to what it asked before.
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
        """Answers what aiohttp could not read, and what its handler should not have raised."""
        if isinstance(exc, ConnectionError):
            # There is nobody left to answer.
            raise exc
        request_id = uuid.uuid4().hex
        if isinstance(exc, HttpProcessingError):
            failure = malformed_request(exc)
            log.debug("malformed request: %d (%s) id=%s", failure.status, type(exc).__name__, request_id)
        else:
            failure = internal_error()
            log.error("request %s failed", request_id, exc_info=exc)
        self._table.metrics.requests.labels("unknown", str(failure.status)).inc()
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer has been sent already")
        answer = error_answer(failure).completed(request_id, 0.0, {})
        response = as_response(answer)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        # What is wrong with a body has been answered; aiohttp meets it again when it looks for the body's
        # end.
        if self._body is None or self._body.exception() is None:
            super().log_exception(*args, **kw)

    def refuse(self, failure: ApiError) -> None:
        """Tells the client what is wrong and closes, without a request that could be answered."""
        answer = error_answer(failure).completed(uuid.uuid4().hex, 0.0, {})
        self._table.metrics.requests.labels("unknown", str(failure.status)).inc()
        if self._wire is not None and not self._wire.is_closing():
            self._wire.write(as_bytes(answer))
        self._end()

    def evict(self, is_told: bool) -> None:
        self._count("evicted")
        if is_told and self._phase is Phase.BODY:
            self._fail_body(too_many_connections())
        else:
            self._abort()
            # Its descriptor is free before the next connection is accepted.
            self.forget()

    def _enter(self, phase: Phase, seconds: float | None) -> None:
        """Goes on to a phase, which may take so long."""
        if self._is_gone:
            return
        self._phase = phase
        self._looked = False
        self._table.enter(self, phase)
        self._deadline = _NEVER if seconds is None else self._loop.time() + seconds
        # A timer that is too early sets itself again, which costs less than to move it with each request.
        if self._timer is None or self._deadline < self._timer.when():
            self._set_timer(self._deadline)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when == _NEVER else self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() < self._deadline:
            self._set_timer(self._deadline)
        elif not self._looked:
            self._looked = True
            self._set_timer(self._loop.time() + _SECOND_LOOK_SECONDS)
        else:
            self._looked = False
            self._time_is_up()

    def _time_is_up(self) -> None:
        match self._phase:
            case Phase.BODY:
                if self._goes_on(self._received - self._mark):
                    self._mark = self._received
                    self._enter(Phase.BODY, self._config.transfer_seconds)
                else:
                    self._count("slow_body")
                    self._fail_body(too_slow("body", "--transfer-seconds"))
            case Phase.SENDING:
                unsent = self._unsent()
                if self._goes_on(self._mark - unsent):
                    self._mark = unsent
                    self._enter(Phase.SENDING, self._config.transfer_seconds)
                else:
                    self._count("slow_reader")
                    self._abort()
            case Phase.HEADERS if self._received:
                self._count("slow_headers")
                self.refuse(too_slow("headers", "--header-seconds"))
            case Phase.CLOSING:
                self._count("slow_reader")
                self._abort()
            case _:
                self._count("idle")
                self._end()

    def _goes_on(self, num_bytes: int) -> bool:
        least = self._config.min_bytes_per_second * self._config.transfer_seconds
        return num_bytes >= max(1, least)

    def _unsent(self) -> int:
        """Bytes that the client has not got yet, in our buffers and in the system's: it takes more of ours
        only when a good part of its own has gone."""
        assert self._wire is not None
        unsent = bytearray(_INT.size)
        with suppress(OSError, AttributeError):
            ioctl(self._wire.get_extra_info("socket").fileno(), TIOCOUTQ, unsent)
        return self._wire.get_write_buffer_size() + int(_INT.unpack(unsent)[0])

    def _end(self) -> None:
        """Closes once what has been written is sent, but does not wait long for that."""
        self._enter(Phase.CLOSING, self._config.transfer_seconds)
        self.force_close()

    def _abort(self) -> None:
        self._enter(Phase.CLOSING, None)
        self.force_close()
        if self._wire is not None:
            if self._wire.get_write_buffer_size() > 0:
                # The answer will not be whole: else the system would hold its part until that is read.
                with suppress(OSError, AttributeError):
                    self._wire.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
            self._wire.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def _count(self, reason: str) -> None:
        self._table.metrics.cut_connections.labels(reason).inc()
