"""Where clients come in: who is let in on the sockets that the server listens on.

Connections are accepted here rather than by the event loop's own server, which closes new ones without a word
where the process has no descriptor left.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

from maxsimd.api.connection_table import ConnectionTable
from maxsimd.api.connections import Connection
from maxsimd.api.failures import error_answer, too_many_connections
from maxsimd.api.logs import SeldomLogger
from maxsimd.api.responses import as_bytes
from maxsimd.api.sockets import BACKLOG

log = logging.getLogger("maxsimd.serve")

# Accepted before what else there is to do has its turn.
_AT_ONCE = 8
# Where the system has no room for a connection, accepting pauses for this long.
_REST_SECONDS = 0.1
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """Listens, and makes connections of those who come. Used from the event loop's thread alone."""

    def __init__(self, server: web.Server, table: ConnectionTable, tls: ssl.SSLContext | None) -> None:
        self._server = server
        self._table = table
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        # The event loop alone would forget them.
        self._opening: set[asyncio.Task[Any]] = set()
        self._no_room = SeldomLogger(log)
        self._full = SeldomLogger(log)

    def start(self, sockets: Sequence[socket.socket]) -> None:
        """Lets in those who come to sockets that listen, which are closed with this; other processes may let
        in some of them."""
        self._sockets = [*sockets]
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    @property
    def port(self) -> int:
        """The port that is listened on; 0 before that."""
        return int(self._sockets[0].getsockname()[1]) if self._sockets else 0

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine can connect."""
        addresses = (listening.getsockname()[0].partition("%")[0] for listening in self._sockets)
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)

    def close(self) -> None:
        """Listens no longer. Those who have come by now are let in."""
        for listening in self._sockets:
            if self._loop.remove_reader(listening):
                for _ in range(BACKLOG // _AT_ONCE):
                    if not self._accept(listening):
                        break
                self._loop.remove_reader(listening)
            listening.close()
        self._sockets.clear()

    def _accept(self, listening: socket.socket) -> bool:
        """Lets in some of those who have come; returns whether there may be more."""
        for _ in range(_AT_ONCE):
            try:
                arrived, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                # Others are errors of the one who came, and has left again.
                if error.errno in _NO_ROOM:
                    self._rest(listening, error)
                    return False
                continue
            self._let_in(arrived)
        return True

    def _rest(self, listening: socket.socket, error: OSError) -> None:
        """Makes room, and waits a moment for it."""
        for _ in range(_AT_ONCE):
            self._table.evict()
        self._no_room.warning(
            "cannot accept connections: %s; raise the limit on descriptors (ulimit -n), "
            "or lower --max-connections",
            error.strerror,
        )
        self._loop.remove_reader(listening)
        self._loop.call_later(_REST_SECONDS, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _let_in(self, arrived: socket.socket) -> None:
        arrived.setblocking(False)
        if self._table.is_full:
            self._full.warning("there are %d connections, as many as --max-connections", self._table.most)
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
            # Whoever came has left again, speaks no TLS, was too slow, or had to make room.
            log.debug("a connection could not be opened")
            connection.forget()
            arrived.close()

    def _refuse(self, arrived: socket.socket) -> None:
        self._table.metrics.cut_connections.labels("refused").inc()
        if self._tls is None:
            answer = error_answer(too_many_connections()).completed(uuid.uuid4().hex, 0.0, {})
            with suppress(OSError):
                arrived.send(as_bytes(answer))
        arrived.close()
