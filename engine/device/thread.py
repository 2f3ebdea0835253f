"""The device thread: the only thread that touches the model and its tensors.

It runs an event loop of its own, on which the runner, pooling and scoring actors live.
"""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from maxsimd.engine.actors.turns import Turn
from maxsimd.engine.at_exit import close_at_exit, note_closed

T = TypeVar("T")

# The names of all engine threads begin with this.
_PREFIX = "maxsimd-"
_left_behind: list[threading.Thread] = []


class Device(Protocol):
    """The thread of an engine's device: its own, or a seat on a shared thread, where each step needs
    a `turn`."""

    loop: asyncio.AbstractEventLoop
    turn: Turn | None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]: ...

    def close(self, seconds: float | None = None) -> bool: ...

    def declare_stuck(self) -> None: ...


class DeviceThread:
    """A thread with an event loop that runs coroutines of other threads."""

    turn: Turn | None = None

    def __init__(self, name: str = "device") -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"{_PREFIX}{name}", daemon=True)
        self._thread.start()
        close_at_exit(self)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the device thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs a plain function on the device thread and waits for it."""

        async def run() -> T:
            return function()

        return await asyncio.wrap_future(self.run(run()))

    def close(self, seconds: float | None = None) -> bool:
        """Cancels what still runs there and joins the thread for at most `seconds`. Returns whether it ended.

        A thread that did not is left behind with all that it holds. It ends if it ever goes on."""
        note_closed(self)
        self.request_end()
        self._thread.join(seconds)
        if self.is_alive:
            _left_behind.append(self._thread)
        return not self.is_alive

    def request_end(self) -> None:
        """Makes the thread end after the work it has already been given, without waiting for that."""
        self.is_closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def declare_stuck(self) -> None:
        """Does nothing: nobody else waits for this thread."""

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()


def num_left_behind() -> int:
    """The number of stuck device threads that this process has left behind."""
    _left_behind[:] = [thread for thread in _left_behind if thread.is_alive()]
    return len(_left_behind)


def stacks() -> str:
    """The stacks of all engine threads in this process."""
    frames, found = sys._current_frames(), []
    for thread in threading.enumerate():
        if thread.name.startswith(_PREFIX) and thread.ident in frames:
            found.append(f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}")
    return "\n".join(sorted(found))
