"""How a process is asked to end, and what ends it where it cannot itself."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator

import pytest

from maxsimd.api import signals
from maxsimd.api.signals import SIGNALS, Stop, handled_signals
from tests.waiting import until


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The statuses with which the process would have ended at once."""
    statuses: list[int] = []
    monkeypatch.setattr(signals, "leave_at_once", statuses.append)
    monkeypatch.setattr(signals, "_MARGIN_SECONDS", 0.2)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as if `nohup` did not run the tests
    yield statuses
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_starts_the_drain_and_the_grace_period(
    left: list[int], number: signal.Signals
) -> None:
    drain = 0.0 if number == signal.SIGINT else 0.2
    stop = Stop(grace=100, drain=0.2)
    asked = asyncio.create_task(stop.asked())
    assert not await stop.asked_within(0.05)
    assert not stop.is_asked
    assert not asked.done()
    os.kill(os.getpid(), number)
    async with asyncio.timeout(5):
        assert await stop.asked_within(100)
        await asked
    assert stop.is_asked
    assert 99 < stop.deadline - drain - asyncio.get_running_loop().time() <= 100
    await stop.drained()
    if drain:
        assert asyncio.get_running_loop().time() > stop.deadline - 100.1
    assert left == []
    stop.done()


def test_a_server_that_ignores_hangups_goes_on_doing_so(left: list[int]) -> None:
    """As `nohup` has it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert handled_signals() == [signal.SIGTERM, signal.SIGINT]


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
