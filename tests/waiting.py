"""Waiting for what other threads and processes do, and a clock that a test holds."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Pause:
    """A place in a call where its thread waits until the test lets it go on."""

    def __init__(self) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def here(self, *_: object) -> None:
        self.is_there.set()
        assert self.may_go_on.wait(1200)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:

        def paused(*given: Any, **named: Any) -> Any:
            self.here()
            return function(*given, **named)

        return paused


async def until(condition: Callable[[], bool]) -> None:
    """Looks again and again; TimeoutError when it does not come true."""
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.01)


def wait_for(condition: Callable[[], bool], seconds: float = 600) -> None:
    """The same without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.01)
