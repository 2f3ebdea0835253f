"""How a process is asked to end, and what ends it where it cannot itself."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator

import pytest

from maxsimd.api import signals
from maxsimd.api.signals import SIGNALS, Stop
from tests.waiting import until


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The statuses with which the process would have ended at once."""
    statuses: list[int] = []
    monkeypatch.setattr(signals, "leave_at_once", statuses.append)
    monkeypatch.setattr(signals, "_MARGIN_SECONDS", 0.2)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield statuses
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_asks_and_starts_the_grace_period(left: list[int], number: signal.Signals) -> None:
    stop = Stop(grace=100)
    asked = asyncio.create_task(stop.asked())
    assert not await stop.asked_within(0.05)
    assert not stop.is_asked
    assert not asked.done()
    os.kill(os.getpid(), number)
    async with asyncio.timeout(5):
        assert await stop.asked_within(100)
        await asked
    assert stop.is_asked
    assert 99 < stop.deadline - asyncio.get_running_loop().time() <= 100
    assert left == []
    stop.done()


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_second_signal_ends_the_process_at_once(
    left: list[int], number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Stop(grace=100)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stop.asked(), 120)
    assert left == []
    os.kill(os.getpid(), number)
    await until(lambda: left == [128 + number])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    stop.done()


async def test_a_process_is_ended_soon_after_its_grace_period(left: list[int]) -> None:
    stop, other = Stop(grace=0.1), Stop(grace=0.0)
    stop.begin(7)
    stop.begin(8)  # too late to change anything
    other.done()
    other.begin(0)
    other.done()  # which leaves the process alone
    time.sleep(0.2)  # noqa: ASYNC251 (a busy event loop must not keep it)
    assert left == []
    time.sleep(0.3)  # noqa: ASYNC251
    assert left == [7]
    stop.done()
