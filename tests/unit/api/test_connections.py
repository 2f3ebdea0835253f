"""Connections that make room when there are too many, and the most that there may be."""

import asyncio
import resource
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from maxsimd.api.answer import ApiError
from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.http import connections
from maxsimd.api.http.connections import Connection, ConnectionTable, Phase
from maxsimd.api.http.sockets import max_connections, raise_descriptor_limit
from maxsimd.api.state import ServerMetrics


class Room:
    """A table with connections that enter their phases when they are told to, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.table = ConnectionTable(ServerConfig(max_bodies_mb=1), 3, ServerMetrics(CollectorRegistry()))
        self.evicted: list[tuple[str, bool]] = []
        self._connections: dict[str, StandIn] = {}

    def enter(self, name: str, phase: Phase) -> None:
        self.now += 0.1
        self.table.enter(self.named(name), phase)

    def leave(self, name: str) -> None:
        self.table.leave(self.named(name))

    def evict(self) -> str | None:
        return self.evicted[-1][0] if self.table.evict() else None

    def named(self, name: str) -> Any:
        return self._connections.setdefault(name, StandIn(self, name))


class StandIn:
    def __init__(self, room: Room, name: str) -> None:
        self._room, self._name = room, name

    def evict(self, is_told: bool) -> None:
        self._room.evicted.append((self._name, is_told))
        self._room.table.enter(self, Phase.ANSWERING)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(monkeypatch)


async def test_idle_connections_make_room_first_by_how_long(room: Room) -> None:
    for name in ("first", "second", "third"):
        room.enter(name, Phase.IDLE)
    room.enter("receiving", Phase.BODY)
    room.enter("sending", Phase.SENDING)
    room.enter("first", Phase.LINGERING)
    room.enter("answered", Phase.ANSWERING)
    room.now += 10
    order = ["second", "third", "first", "receiving", "sending"]
    assert [room.evict() for _ in range(6)] == [*order, None], "the server works for one"
    room.enter("receiving", Phase.BODY)
    room.now += 10
    room.enter("new", Phase.HEADERS)
    assert room.evict() == "receiving", "the other has just come"


async def test_those_on_their_way_out_do_not_count(room: Room) -> None:
    for name in ("first", "second", "third"):
        assert not room.table.is_full
        room.enter(name, Phase.BODY)
    assert room.table.is_full
    room.evict()
    assert not room.table.is_full
    room.enter("fourth", Phase.BODY)
    assert room.table.is_full
    room.leave("first")
    assert room.table.is_full
    for number in range(10):
        room.enter(f"sender_{number}", Phase.BODY)
        room.evict()
    assert [is_told for _, is_told in room.evicted] == [True] * 9 + [False] * 2, "only a few are told"


async def test_a_table_is_quiet_when_all_wait_and_then_empty(room: Room) -> None:
    room.enter("first", Phase.BODY)
    room.enter("second", Phase.IDLE)
    quiet, empty = (asyncio.create_task(wait()) for wait in (room.table.until_quiet, room.table.until_empty))
    for phase in (Phase.BODY, Phase.ANSWERING, Phase.SENDING):
        room.enter("first", phase)
        await asyncio.sleep(0.001)
        assert not quiet.done()
    room.enter("first", Phase.CLOSING)
    await asyncio.wait_for(quiet, 600)
    room.leave("first")
    await asyncio.sleep(0.001)
    assert not empty.done()
    room.leave("second")
    await asyncio.wait_for(empty, 600)
    connection = Connection(web.Server(Mock()), room.table, asyncio.get_running_loop())
    connection.forget()
    connection._enter(Phase.IDLE, 1.0)  # as when the answer to its last request is done with
    await asyncio.wait_for(room.table.until_empty(), 600)


async def test_upgrade_is_renamed_in_heads_and_never_in_bodies(room: Room) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    text = b"\r\nUpgrade: x\r\n\r\nUpgrade:"
    chunk = b"%x\r\n%s\r\n" % (len(text), text)
    upgrade = head + b"Content-Length: %d\r\n\r\n" % len(text) + text
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    middle = head.index(b"grade: h2c")
    # Bytes as they arrive, and for each request in them, whether it is an upgrade.
    for parts, upgrades in (
        ([upgrade + get], [False, False]),
        ([get, upgrade + get], [False, False, False]),
        ([upgrade[:middle], upgrade[middle:]], [True]),
        ([get * 32, upgrade], [*[False] * 32, True]),
        ([chunked, chunk, b"0\r\n\r\n"], [False]),
        ([chunked + chunk[:6], chunk[6:] + b"0\r\n\r\n"], [False]),
        ([chunked[:-1], chunked[-1:] + chunk + b"0\r\n\r\n"], [False]),
        ([chunked[:-3], chunked[-3:] + chunk + b"0\r\n\r\n"], [False]),
    ):
        connection = Connection(web.Server(Mock()), room.table, asyncio.get_running_loop())
        for part in parts:
            connection.data_received(part)
        assert [message.upgrade for message, _ in connection._messages] == upgrades, parts
        for _, body in connection._messages:
            assert await body.read() in (b"", text)
        connection.forget()


async def test_bodies_in_tiny_chunks_are_refused(room: Room) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    last = b"0\r\n\r\n"
    for size, count, end in ((1, 40_000, last), (1, 40_000, last[:3] + b"a: b\r\n\r\n"), (16, 16_000, last)):
        connection = Connection(web.Server(Mock()), room.table, asyncio.get_running_loop())
        connection.data_received(head + count * (b"%x\r\n%b\r\n" % (size, b"w" * size)) + end)
        [(_, body)] = connection._messages
        if size == 1:
            with pytest.raises(ApiError, match="tiny chunks; send at least 16 bytes"):
                await body.read()
        else:
            assert len(await body.read()) == count * size
        connection.forget()


def test_connections_are_as_many_as_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    without = resource.RLIM_INFINITY
    for asked_for, descriptors, most in (
        *((None, 64, 16), (None, 200, 100), (None, 1024, 924), (None, 1 << 20, 10_000)),
        *((None, without, 10_000), (20_000, without, 20_000), (1, 64, 1), (924, 1024, 924)),
    ):
        assert max_connections(asked_for, descriptors) == most
    with pytest.raises(SetupError, match=r"a limit of 31 descriptors .* too low .* raise it to 32 or more"):
        max_connections(None, 31)
    with pytest.raises(SetupError, match="925 is more than the 924 that a limit of 1024 descriptors"):
        max_connections(925, 1024)
    limits: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr("maxsimd.api.http.sockets.resource.getrlimit", limits.__getitem__)
    monkeypatch.setattr("maxsimd.api.http.sockets.resource.setrlimit", limits.__setitem__)
    for soft, hard, raised in (
        *((64, 64, 64), (64, 4096, 4096), (64, 1 << 30, 1 << 20)),
        *((64, without, 1 << 20), (without, without, without)),
    ):
        limits[resource.RLIMIT_NOFILE] = (soft, hard)
        assert (raise_descriptor_limit(), limits) == (raised, {resource.RLIMIT_NOFILE: (raised, hard)})
    limits[resource.RLIMIT_NOFILE] = (256, 4096)
    refuse = Mock(side_effect=ValueError("not allowed to raise maximum limit"))
    monkeypatch.setattr("maxsimd.api.http.sockets.resource.setrlimit", refuse)
    assert raise_descriptor_limit() == 256
