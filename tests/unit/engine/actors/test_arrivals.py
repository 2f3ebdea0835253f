"""Waiting for results beside the device thread: in order, whatever becomes of those who wait."""

import asyncio
import threading

import torch

from maxsimd.engine.actors.arrivals import Arrivals
from tests.waiting import until


class Event:
    def __init__(self, error: Exception | None = None) -> None:
        self.reached, self.arrived = threading.Event(), threading.Event()
        self.error = error

    def synchronize(self) -> None:
        self.reached.set()
        assert self.arrived.wait(120)
        if self.error is not None:
            raise self.error


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "maxsimd-arrivals"]


async def test_each_waits_for_its_own_and_is_given_its_own_error() -> None:
    before = len(_threads())
    arrivals = Arrivals(torch.device("cpu"))
    assert len(_threads()) == before, "a CPU needs no such thread"
    events = [Event(), Event(RuntimeError("lost")), Event()]
    waiting = [asyncio.create_task(arrivals.until(event)) for event in events]
    await until(lambda: len(_threads()) == before + 1)
    assert all(thread.daemon for thread in _threads())
    events[1].arrived.set()
    events[2].arrived.set()
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    events[0].arrived.set()
    first, second, third = await asyncio.gather(*waiting, return_exceptions=True)
    assert (first, str(second), third) == (None, "lost", None)
    arrivals.close()
    await until(lambda: len(_threads()) == before)


async def test_one_that_is_not_waited_for_any_more_keeps_up_no_other() -> None:
    arrivals = Arrivals(torch.device("cpu"))
    slow, never, last = Event(), Event(), Event()
    waiting = [asyncio.create_task(arrivals.until(event)) for event in (slow, never, last)]
    await until(slow.reached.is_set)
    for task in waiting[:2]:
        task.cancel()
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    await asyncio.sleep(0.05)
    slow.arrived.set()
    last.arrived.set()
    async with asyncio.timeout(10):
        await waiting[2]
    arrivals.close()
