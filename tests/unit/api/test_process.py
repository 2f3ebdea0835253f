"""A process that serves: its memory, how late its event loop is, what killed fleets leave, how it ends."""

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client import CollectorRegistry

from maxsimd.api import process
from maxsimd.api.config import ServerConfig
from maxsimd.api.fleet import process as replica
from maxsimd.api.fleet.fleet_engine import FleetEngine
from maxsimd.api.fleet.supervisor import Setup, locked_folder, remove_left_folders
from maxsimd.api.state import ServerMetrics
from maxsimd.engine import EngineConfig, Tenant
from tests.waiting import until, wait_for


async def test_a_dead_replica_ends_in_any_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Mock(death="of old age", start=AsyncMock(), until_dead=AsyncMock(), stop=AsyncMock())
    monkeypatch.setattr(replica, "Engine", Mock(return_value=engine))
    monkeypatch.setattr(replica, "EngineAnswers", Mock())
    begin = Mock()
    monkeypatch.setattr(process.Stop, "begin", begin)
    setup = Setup(False, 0, (str(tmp_path / "0"),), (), (), EngineConfig(), ServerConfig(), b"")
    assert await replica._engine(setup, 0.0) == 1
    begin.assert_called_once_with(1)


async def test_a_front_has_its_tenants_before_it_connects(tmp_path: Path, monkeypatch: Any) -> None:
    async def connect(engine: FleetEngine, paths: object) -> None:
        assert engine._roster.tenants == {"a": Tenant(weight=2)}
        raise ConnectionError

    monkeypatch.setattr(replica, "_connect", connect)
    keys = tmp_path / "keys"
    keys.write_text("one name=a weight=2")
    server = ServerConfig(api_key_file=str(keys))
    setup = Setup(True, 0, (), (str(tmp_path / "front"),), (), EngineConfig(), server, b"")
    with pytest.raises(ConnectionError):
        await replica._front(setup, 0.0)


class Circle:
    def __init__(self) -> None:
        self.own = self


def aged_circle() -> Callable[[], object]:
    circle = Circle()
    gc.collect(1)
    return weakref.ref(circle)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()  # else each collection walks through all that other tests have left
    monkeypatch.setattr(process, "_LOOK_SECONDS", 0.001)


def test_older_objects_are_frozen_and_unfrozen_after() -> None:
    before = gc.get_threshold()
    with process.postponed_garbage_collection():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] >= 1_000_000_000
        circle = aged_circle()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
    gc.collect()
    assert circle() is None


@asynccontextmanager
async def collecting(
    is_quiet: Callable[[], bool] = lambda: True, resident: Callable[[], int] = lambda: 0
) -> AsyncIterator[None]:
    with process.postponed_garbage_collection():
        task = asyncio.create_task(process.collect_when_quiet(is_quiet, resident))
        yield
        task.cancel()


async def test_what_has_aged_is_collected_when_quiet_or_late(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = [False]
    async with collecting(lambda: quiet[-1]):
        circle = aged_circle()
        await asyncio.sleep(0.1)
        assert circle() is not None
        quiet.append(True)
        await until(lambda: circle() is None)
    monkeypatch.setattr(process, "_LONGEST_SECONDS", 0.05)
    given: list[bool] = []
    async with collecting(lambda: False):
        circle = aged_circle()
        monkeypatch.setattr(process, "give_back_memory", lambda: given.append(circle() is None))
        await until(lambda: True in given)


async def test_a_long_collection_delays_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    collections: list[float] = []

    def collect() -> None:
        time.sleep(0.002)
        collections.append(time.monotonic())

    async with collecting():
        monkeypatch.setattr(process.gc, "collect", collect)
        monkeypatch.setattr(process.gc, "get_count", lambda: (0, 0, 1))
        await until(lambda: len(collections) >= 2)
    assert all(later - earlier >= 200 * 0.002 for earlier, later in itertools.pairwise(collections))


async def test_what_has_grown_is_collected_though_nothing_has_aged(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, collections = [500 << 20], list[int]()
    async with collecting(resident=lambda: sizes[-1]):
        monkeypatch.setattr(process.gc, "collect", lambda: collections.append(1))
        monkeypatch.setattr(process.gc, "get_count", lambda: (600, 9, 0))
        for size in (500, 100, 228):
            sizes.append(size << 20)
            await asyncio.sleep(0.05)
        assert collections == []
        sizes.append((228 << 20) + 1)
        await until(lambda: len(collections) > 0)


def test_memory_is_known_and_shared_where_the_system_can(monkeypatch: pytest.MonkeyPatch) -> None:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 10 << 20 < process.resident_bytes() < most + (10 << 20)
    monkeypatch.setattr(process, "Path", Mock(return_value=Mock(read_text=Mock(side_effect=OSError))))
    assert process.resident_bytes() == 0, "the system does not say"
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: object())
    process.share_heaps(2)


# Prints how many heaps there are once 12 threads have allocated at the same time.
_PROGRAM = """
import ctypes, re, sys, tempfile, threading
from maxsimd.api.process import share_heaps
from maxsimd.api.state import ServerMetrics
share_heaps(int(sys.argv[1]))
c = ctypes.CDLL(None)
c.malloc.restype, c.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
together = threading.Barrier(13)
def allocate():
    together.wait()
    for _ in range(2000):
        c.malloc(600)
    together.wait()
for _ in range(12):
    threading.Thread(target=allocate).start()
together.wait(); together.wait()
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(c.fopen(file.name.encode(), b"w"))
    c.malloc_info(0, stream)
    c.fclose(stream)
    print(len(re.findall(rb"<heap nr", file.read())))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="these are glibc's")
@pytest.mark.parametrize(
    ("threads", "environment", "most"), [(1, {}, 2), (4, {}, 4), (1, {"MALLOC_ARENA_MAX": "5"}, 5)]
)
def test_there_are_no_more_heaps_than_cores(threads: int, environment: dict[str, str], most: int) -> None:
    others = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", _PROGRAM, str(threads)]
    ran = subprocess.run(command, env=others | environment, capture_output=True, text=True, check=True)
    assert int(ran.stdout) == most


async def test_only_what_the_event_loop_is_late_counts_as_lag() -> None:
    registry = CollectorRegistry()

    def lag(sample: str, **labels: str) -> float:
        return registry.get_sample_value(f"maxsimd_event_loop_lag_seconds_{sample}", labels) or 0.0

    watcher = asyncio.create_task(ServerMetrics(registry).watch_lag())
    await until(lambda: watcher.done() or lag("bucket", le="0.05") >= 1)  # now and then it is hardly late
    count, total = lag("count"), lag("sum")
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 (this is what must be noticed)
    await until(lambda: watcher.done() or lag("count") > count)
    # It slept for at most its period of 0.1 s meanwhile, which is not lag.
    assert 0.25 < lag("sum") - total < 30
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher


def test_folders_of_killed_fleets_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, kept, linked = (tmp_path / f"maxsimd-fleet-{name}" for name in ("left", "kept", "linked"))
    for folder in (left, kept, tmp_path / "elsewhere"):
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(folder / "engine-0"))
    (kept / "notes").write_text("nobody's socket")
    linked.symlink_to(tmp_path / "elsewhere")
    with locked_folder() as living:
        remove_left_folders()
        assert {*os.listdir(tmp_path)} == {"elsewhere", kept.name, linked.name, Path(living).name}
        assert [path.name for path in kept.iterdir()] == ["notes"]
        assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["engine-0"]
    assert not Path(living).exists()


@pytest.mark.parametrize("end", ["1 / 0", "time.sleep(3600)"])
def test_output_that_nobody_takes_delays_no_exit(end: str) -> None:
    output = f"sys.stdout = type('', (), {{'flush': lambda self: {end}}})()"
    code = f"import sys, time\nfrom maxsimd.api import process\n{output}\nprocess.exit_at_once(3)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 3


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The statuses with which the process would have ended at once."""
    statuses: list[int] = []
    monkeypatch.setattr(process, "exit_at_once", statuses.append)
    monkeypatch.setattr(process, "_MARGIN_SECONDS", 0.2)
    before = {number: signal.getsignal(number) for number in process.SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as if `nohup` did not run the tests
    yield statuses
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", process.SIGNALS)
async def test_a_signal_starts_drain_and_grace_period(left: list[int], number: signal.Signals) -> None:
    drain = 0.0 if number == signal.SIGINT else 0.2
    stop = process.Stop(grace=100, drain=0.2)
    asked = asyncio.create_task(stop.signaled())
    assert not await stop.signaled_within(0.05)
    assert (stop.is_signaled, asked.done()) == (False, False)
    clock = asyncio.get_running_loop().time
    before = clock()
    os.kill(os.getpid(), number)
    async with asyncio.timeout(600):
        assert await stop.signaled_within(100)
        await asked
    assert stop.is_signaled
    assert before <= stop.deadline - drain - 100 <= clock()
    await stop.drained()
    if drain:
        assert clock() > stop.deadline - 100.1
    assert left == []
    stop.done()


def test_a_server_that_ignores_hangups_goes_on_doing_so(left: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert process.handled_signals() == [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", process.SIGNALS)
async def test_a_second_signal_ends_it_at_once(left: list[int], number: signal.Signals, caplog: Any) -> None:
    stop = process.Stop(grace=100)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stop.signaled(), 600)
    assert left == []
    os.kill(os.getpid(), number)
    await until(lambda: left == [128 + number])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    stop.done()


async def test_a_process_is_ended_soon_after_its_grace_period(left: list[int]) -> None:
    begun = time.monotonic()
    stop, other = process.Stop(grace=0.1), process.Stop(grace=0.0)
    stop.begin(7)
    stop.begin(8)  # too late to change anything
    other.done()
    other.begin(0)
    other.done()  # which leaves the process alone
    wait_for(lambda: left == [7])  # a busy event loop must not keep it
    assert time.monotonic() - begun > 0.29
    stop.done()
