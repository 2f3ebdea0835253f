"""Loads of models that can be given up: they end at the next stage, with all that they have begun."""

import asyncio
import atexit
import gc
import threading
import time
from collections.abc import Callable

import torch

from maxsimd.engine.device.allocators import give_back_memory
from maxsimd.engine.device.load import DeviceModel, stages
from maxsimd.engine.device.thread import DeviceThread

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
