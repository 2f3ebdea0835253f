"""All connections that are open, and which one makes room when there are too many."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

from maxsimd.api.config import ServerConfig
from maxsimd.api.metrics import ServerMetrics

# At most this many at a time are told that they must make room, and do so a little later.
_MOST_LEAVING = 8
# For how long a client's silence says nothing of it.
_NEW_SECONDS = 1.0
_NEVER = float("inf")


class Phase(Enum):
    """What a connection waits for."""

    IDLE = "the next request"
    HEADERS = "the rest of a request's headers, or the first of them"
    BODY = "the rest of a body"
    ANSWERING = "the server"
    SENDING = "a client to read its answer"
    LINGERING = "the rest of a body that was answered already"
    CLOSING = "what is left of the last answer to be read"


_WAITING = frozenset({Phase.IDLE, Phase.HEADERS, Phase.LINGERING, Phase.CLOSING})
_TRANSFERRING = frozenset({Phase.BODY, Phase.SENDING})


class Evictable(Protocol):
    """A connection, as far as the table goes."""

    def evict(self, is_told: bool) -> None:
        """Makes room for others: at once, or, where there is a request and its client is told, soon."""


class ConnectionTable:
    """All connections that are open. When there are too many, one makes room that the server has nothing to
    do for: the one that has waited longest for its client's next word, or received or sent for longest. Those
    that only wait come first, but not those that have just come."""

    def __init__(self, config: ServerConfig, most: int, metrics: ServerMetrics) -> None:
        self.config = config
        self.most = most
        self.metrics = metrics
        self._open: set[Evictable] = set()
        # In the order in which they entered their phases, and when that was.
        self._waiting: dict[Evictable, float] = {}
        self._transferring: dict[Evictable, float] = {}
        # How many bytes of answers they have not read, those that have begun first coming first.
        self._unread: dict[Evictable, int] = {}
        # Those that are told to make room.
        self._leaving: set[Evictable] = set()
        self._changed = asyncio.Event()
        metrics.connections.set_function(lambda: len(self._open))

    @property
    def is_full(self) -> bool:
        return len(self._open) - len(self._leaving) >= self.most

    def enter(self, connection: Evictable, phase: Phase) -> None:
        self._open.add(connection)
        self._waiting.pop(connection, None)
        self._transferring.pop(connection, None)
        if phase in _WAITING:
            self._waiting[connection] = time.monotonic()
        elif phase in _TRANSFERRING:
            self._transferring[connection] = time.monotonic()
        self._changed.set()

    def leave(self, connection: Evictable) -> None:
        self._open.discard(connection)
        self._leaving.discard(connection)
        self._waiting.pop(connection, None)
        self._transferring.pop(connection, None)
        self._changed.set()

    def evict(self) -> bool:
        """Ends a connection to make room, if there is one that the server has nothing to do for."""
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
    def sending(self, connection: Evictable, size: int) -> Iterator[None]:
        """While an answer of `size` bytes is written. Where all together are more than memory is for, those
        that have been read for longest are given up."""
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
        """Returns when every answer has been handed to the system, so that only waiting connections are
        left."""
        while len(self._waiting) < len(self._open):
            self._changed.clear()
            await self._changed.wait()

    async def until_empty(self) -> None:
        while self._open:
            self._changed.clear()
            await self._changed.wait()
