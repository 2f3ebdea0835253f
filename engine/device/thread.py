"""The device thread: the only thread that touches the model and its tensors.

It runs an event loop of its own, on which the model runner, pooling and scoring live.
"""

import asyncio
import atexit
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from maxsimd.engine.actors.turns import Turn
from maxsimd.engine.device.host import give_back_memory
from maxsimd.engine.device.load import DeviceModel, stages

T = TypeVar("T")

# How all threads of an engine are called.
_PREFIX = "maxsimd-"
_left_behind: list[threading.Thread] = []


class Device(Protocol):
    """Where an engine's device runs: a thread of its own, or a seat on one that it shares. Where it is
    shared, a step needs a `turn`."""

    loop: asyncio.AbstractEventLoop
    turn: Turn | None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]: ...

    def close(self, seconds: float | None = None) -> bool: ...

    def declare_stuck(self) -> None: ...


class DeviceThread:
    """A thread with an event loop; coroutines are handed to it and awaited from elsewhere."""

    turn: Turn | None = None

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"{_PREFIX}device", daemon=True)
        self._thread.start()

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
        """Cancels what still runs there and joins the thread, for at most that long; says whether it ended.

        One that did not is left behind with all that it holds. It ends if ever it goes on."""
        self.end_soon()
        if not self.join(seconds):
            _left_behind.append(self._thread)
        return not self.is_alive

    def end_soon(self) -> None:
        """Has the thread end once it has done what was handed to it before, without waiting for that."""
        self.is_closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self, seconds: float | None = None) -> bool:
        """Waits for the thread's end, for at most that long; says whether it ended."""
        self._thread.join(seconds)
        return not self.is_alive

    def declare_stuck(self) -> None:
        """Nobody else waits for this thread."""

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()


def num_left_behind() -> int:
    """How many device threads of this process are stuck and were left behind."""
    _left_behind[:] = [thread for thread in _left_behind if thread.is_alive()]
    return len(_left_behind)


def stacks() -> str:
    """Where the threads of all engines in this process stand."""
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread.name.startswith(_PREFIX)}
    shown = [
        f"{names[ident]}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident in names
    ]
    return "\n".join(sorted(shown))


# The next load waits this long for those that were given up, so that there are not many models in memory.
# One that is stuck in a stage does not hold it up for longer.
_GIVEN_UP_SECONDS = 30.0
_LOOK_SECONDS = 0.02
# The end of the process waits this long for them.
_EXIT_SECONDS = 5.0
# Event loops of several threads may change it, each by operations that are atomic.
_given_up: set[DeviceThread] = set()


class LoadGivenUpError(Exception):
    """Nobody waits for the model any more."""


class ModelLoad:
    """One load. `run` and `free` are called on the thread that loads, `give_up` on any."""

    def __init__(self, load: Callable[[], DeviceModel]) -> None:
        self._load = load
        self._is_given_up = threading.Event()
        self._model: DeviceModel | None = None

    def run(self) -> DeviceModel:
        with stages(self._check):
            self._model = self._load()
        return self._model

    def give_up(self) -> None:
        """Ends the load at its next stage."""
        self._is_given_up.set()

    def free(self) -> None:
        """Frees the model of a load that was given up too late to end early."""
        if self._model is not None and self._model.cache is not None:
            self._model.cache.close()
        self._model = None
        free_memory()

    def _check(self) -> None:
        if self._is_given_up.is_set():
            raise LoadGivenUpError


async def load_on_thread(load: Callable[[], DeviceModel]) -> tuple[DeviceThread, DeviceModel]:
    """Loads a model on a new thread. When this is cancelled, the load is given up and its thread ends soon.
    Ends the thread as well when the load raises an error."""
    await _until_given_up_have_ended()
    thread, model_load = DeviceThread(), ModelLoad(load)
    try:
        return thread, await thread.call(model_load.run)
    except asyncio.CancelledError:
        model_load.give_up()
        # It runs once the load has ended, and the thread's end comes after it.
        thread.loop.call_soon_threadsafe(model_load.free)
        thread.end_soon()
        _given_up.add(thread)
        raise
    except BaseException:
        thread.close()
        raise


async def _until_given_up_have_ended() -> None:
    deadline = time.monotonic() + _GIVEN_UP_SECONDS
    while True:
        if num_given_up() == 0 or time.monotonic() > deadline:
            return
        await asyncio.sleep(_LOOK_SECONDS)


def num_given_up() -> int:
    """How many loads of this process were given up and have not ended yet."""
    for thread in _given_up.copy():
        if not thread.is_alive:
            _given_up.discard(thread)
    return len(_given_up)


@atexit.register
def _join_given_up() -> None:
    """Waits for loads that were given up. A thread inside torch may abort the process while the interpreter
    goes away."""
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in _given_up.copy():
        thread.join(max(0.0, deadline - time.monotonic()))


def free_memory() -> None:
    """Gives back what a model that is gone had. Some of it refers to each other: to count references frees
    only the rest."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    give_back_memory()
