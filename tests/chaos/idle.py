"""Thousands of idle and slow connections: how they delay normal load, and whether each is closed in time."""

import asyncio
import json
import random
import resource
import select
import socket
import tempfile
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from maxsimd.api.http.sockets import raise_descriptor_limit
from tests.chaos.crowd import crowd
from tests.chaos.findings import Found, Row, percentile
from tests.chaos.running import Running, running
from tests.chaos.traffic import Pool, Texts

_ROUNDS = 3
# How much later than its limit says a connection may be closed.
_LATE_SECONDS, _LATE_SHARE = 3.0, 0.1
_TURNS = ("alone", "while slow clients come", "beside slow clients")
_OTHER_DESCRIPTORS = 100
_AT_A_TIME = 50
# How often a client does something; tools that hold connections open do every 10 to 15 seconds.
_EVERY_SECONDS = 5.0
_HEAD = b"POST /rerank HTTP/1.1\r\nHost: x\r\n"
# Answered with more than fits into the system's buffers.
_LONG = json.dumps({"query": "q", "documents": ["word " * 1_000_000]}).encode()


@dataclass(slots=True)
class Kind:
    """Slow clients: their share, what one sends at first and every few seconds, and how many bytes a second
    it reads (None for all); then how many were opened, refused and left open, and the seconds until each
    closed."""

    name: str
    share: float
    first: bytes
    drip: bytes = b""
    reads: int | None = None
    opened: int = 0
    refused: int = 0
    left_open: int = 0
    seconds: list[float] = field(default_factory=list)

    async def client(self, port: int, gate: asyncio.Semaphore) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setblocking(False)
            if self.reads is not None:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            async with gate:
                try:
                    await loop.sock_connect(client, ("127.0.0.1", port))
                    opened = time.monotonic()
                    await loop.sock_sendall(client, self.first)
                    if not self.drip:
                        await loop.sock_recv(client, 1)
                except OSError:
                    self.refused += 1
                    return
            self.opened += 1
            self.left_open += 1
            try:
                await asyncio.sleep(random.uniform(0, _EVERY_SECONDS) if self.drip else 0)
                while await self._read(client):
                    pass
            except OSError:
                pass
            self.left_open -= 1
            self.seconds.append(time.monotonic() - opened)

    async def _read(self, client: socket.socket) -> bytes:
        """Bytes that came, or are about to; none once the connection is closed."""
        loop = asyncio.get_running_loop()
        if self.reads is not None:
            await asyncio.sleep(1)
            # Bytes that came before the end stay unread, and hide the end.
            closed = select.poll()
            closed.register(client, select.POLLHUP)
            return b"" if closed.poll(0) else await loop.sock_recv(client, self.reads)
        if not self.drip:
            return await loop.sock_recv(client, 1 << 16)
        try:
            async with asyncio.timeout(_EVERY_SECONDS):
                return await loop.sock_recv(client, 1 << 16)
        except TimeoutError:
            await loop.sock_sendall(client, self.drip)
            return self.drip


def _kinds() -> list[Kind]:
    return [
        Kind("slow readers", 0.01, _HEAD + b"Content-Length: %d\r\n\r\n" % len(_LONG) + _LONG, reads=100),
        Kind("half headers", 0.4, _HEAD + b"X-Slow: ", b"x"),
        Kind("half bodies", 0.3, _HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
        Kind("idle", 0.29, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"),
    ]


async def _round(server: Running, count: int, window: float, limit: float) -> tuple[list[float], list[Kind]]:
    """When the load was alone, slow clients came, were there, and the turn was over; and what they saw."""
    moments = [time.monotonic()]
    await asyncio.sleep(window)
    moments.append(time.monotonic())
    kinds, gate = _kinds(), asyncio.Semaphore(_AT_A_TIME)
    each = [kind for kind in kinds for _ in range(round(kind.share * count))]
    clients = [asyncio.create_task(kind.client(server.port, gate)) for kind in each]
    while sum(kind.opened + kind.refused for kind in kinds) < len(clients):
        await asyncio.sleep(0.05)
    moments.append(time.monotonic())
    await asyncio.sleep(window)
    moments.append(time.monotonic())
    _, late = await asyncio.wait(clients, timeout=2 * limit)
    for client in late:
        client.cancel()
    return moments, kinds


async def sit_idle(server: Running, pool: Pool, count: int, window: float, limit: float) -> Found:
    """Normal load for `window` seconds, alone and beside slow clients, in turns."""
    descriptors = raise_descriptor_limit()
    if descriptors != resource.RLIM_INFINITY:
        count = min(count, descriptors - _OTHER_DESCRIPTORS)
    with tempfile.TemporaryDirectory() as folder:
        async with crowd(server.url, pool.save(Path(folder, "pool")), 1, "small") as clients:
            await asyncio.sleep(2.0)  # for its start
            rounds = [await _round(server, count, window, limit) for _ in range(_ROUNDS)]
    rows: list[Row] = [("normal requests", "number", "p50 ms", "p99 ms")]
    for turn, name in enumerate(_TURNS):
        waited = [
            1e3 * (record.done - record.sent)
            for record in clients.records
            if any(times[turn] <= record.sent and record.done <= times[turn + 1] for times, _ in rounds)
        ]
        rows.append((name, len(waited), percentile(waited, 0.5), percentile(waited, 0.99)))
    outcomes = Counter(record.outcome for record in clients.records).most_common()
    broken = [f"{record.kind}: {record.reason}" for record in clients.records if record.is_bad]
    latest = limit * (1 + _LATE_SHARE) + _LATE_SECONDS
    closed: list[Row] = [("slow clients", "opened", "refused", "left open", "first closed s", "last s")]
    for kind in (kind for _, kinds in rounds for kind in kinds):
        first, last = min(kind.seconds, default=None), max(kind.seconds, default=None)
        closed.append((kind.name, kind.opened, kind.refused, kind.left_open, first, last))
        if kind.left_open or (last or 0.0) > latest:
            broken.append(f"{kind.name} were not closed after {latest:.0f} s: {kind.left_open}, {last}")
    return Found([rows, outcomes, closed], broken)


def run(options: Namespace) -> Found:
    """`--requests` is the number of slow connections, `--seconds` how long each turn is."""
    window = options.seconds or 15.0
    limit = 2 * window  # they are all open while the load is measured
    names = ("header_seconds", "transfer_seconds", "idle_seconds")
    arguments = [part for name in names for part in ("--limit", f"{name}={limit}")]
    with running(options.model, "--log-level", "warning", *arguments) as server:
        pool = Pool.ask(Texts.draw(options.seed), server.url)
        return asyncio.run(sit_idle(server, pool, options.requests or 5000, window, limit))
