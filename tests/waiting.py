"""Waiting for what other threads and processes do, and a clock that a test holds."""

import asyncio
import time
from collections.abc import Callable


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def until(condition: Callable[[], bool]) -> None:
    """Looks again and again; TimeoutError when it does not come true."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    """The same without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.01)
