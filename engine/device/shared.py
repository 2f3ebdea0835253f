"""A device whose thread several engines share, and each engine's seat on it."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

import torch

from maxsimd.engine.actors.turns import Turn, Turns
from maxsimd.engine.checkpoint.stages import LOADING
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.load import (
    DeviceModel,
    ModelLoad,
    load_device_model,
    load_on_thread,
    prepare_thread,
)
from maxsimd.engine.device.thread import DeviceThread
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.devices import choose_device

T = TypeVar("T")

# Seconds between the checks of a closing seat whether to wait any longer.
_LOOK_SECONDS = 0.05


class DeviceLostError(Exception):
    """The thread of a shared device is stuck with another model's step."""

    def __init__(self) -> None:
        super().__init__("the device's thread is stuck with a step of another model")


class DeviceTaskError(Exception):
    """A task of one engine tried to end the thread that all engines share."""


class _EnduringThread(DeviceThread):
    """A device thread that no task can end, not even by SystemExit: other engines live on it."""

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            loop = runner.get_loop()
            while not self.is_closing:
                try:
                    loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    continue


class SharedDevice:
    """The thread of one device, the turns on it, and the seats of the engines that share it.

    The first engine's `threads` hold for all: the number belongs to the thread."""

    def __init__(self, device: torch.device, threads: int | None) -> None:
        self.device, self.threads = device, threads
        self.turns, self.thread = Turns(), _EnduringThread()
        self.seats: set[Seat] = set()
        self.is_lost = False
        # Before anything else that runs there.
        self.thread.loop.call_soon_threadsafe(prepare_thread, device, threads)

    def seat(self, weight: float, threads: int | None) -> "Seat":
        """A seat for one more engine. Raises ModelLoadError if its number of threads differs."""
        if threads != self.threads:
            raise ModelLoadError(
                f"models of one process share the threads for computing: threads is {self.threads} for those "
                f"that are there, and {threads} for this one; set it alike for all"
            )
        seat = Seat(self, self.turns.join(weight))
        self.seats.add(seat)
        return seat

    def lose(self) -> None:
        """Leaves the stuck thread behind and fails everything that waits on a seat."""
        if self.is_lost:
            return
        self.is_lost = True
        self.thread.close(0)
        for seat in list(self.seats):
            seat.fail(DeviceLostError())

    def close(self) -> None:
        if not self.is_lost:
            self.thread.close()


class Seat:
    """One engine's part of a shared device. It is used like a `DeviceThread`, but closing it ends only what
    was started through it."""

    def __init__(self, shared: SharedDevice, turn: Turn) -> None:
        self._shared, self.loop = shared, shared.thread.loop
        self.turn: Turn | None = turn
        self._turn = turn
        # Several threads change it, each by atomic operations.
        self._results: set[Future[Any]] = set()
        # Only the device's loop touches its tasks.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._was_used = self._is_closing = False
        self._ended = threading.Event()

    @property
    def seconds(self) -> float:
        """The device time that the engine has used."""
        return self._turn.seconds

    async def load(self, config: EngineConfig) -> DeviceModel:
        """Loads a model while others are served; loads run one at a time. Raises ModelLoadError.

        On a CPU the load has its own thread and takes a turn only to read the checkpoint. On a GPU all of it
        is one turn on the device's thread: what others launch meanwhile could get into its CUDA graphs."""
        if self._shared.device.type == "cpu":
            thread, model = await load_on_thread(lambda: _load_alone(config, self._turn_held()))
            thread.close()
            return model
        load = ModelLoad(lambda: _load_alone(config), self._shared.thread, shares_thread=True)
        try:
            return await asyncio.wrap_future(self.run(self._load_in_turn(load)))
        except asyncio.CancelledError:
            load.give_up()
            raise

    async def _load_in_turn(self, load: ModelLoad) -> DeviceModel:
        async with self._turn:
            return load.run()

    @contextmanager
    def _turn_held(self) -> Iterator[None]:
        """Keeps the device from running steps, for a thread other than the device's: while transformers
        creates a model, it sets torch's default precision for the whole process. The turn ends with the
        reading, even if the load is given up before."""
        granted: Future[None] = Future()
        is_over = asyncio.Event()

        async def hold() -> None:
            async with self._turn:
                granted.set_result(None)
                while not is_over.is_set():
                    try:
                        await is_over.wait()
                    except asyncio.CancelledError:
                        if self._shared.thread.is_closing:  # no steps are left to run
                            raise

        held = self.run(hold())
        held.add_done_callback(lambda _: granted.cancel())
        try:
            granted.result()
        except CancelledError:
            raise ModelLoadError("the device's thread has ended, or is stuck with another model") from None
        try:
            yield
        finally:
            with suppress(RuntimeError):  # the thread has ended
                self.loop.call_soon_threadsafe(is_over.set)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the device thread."""
        result: Future[T] = Future()
        self._was_used = True
        self._results.add(result)
        result.add_done_callback(self._results.discard)
        if self._shared.is_lost:  # after the result was added: else it could be lost in between
            coroutine.close()
            self.fail(DeviceLostError())
            return result

        def begin() -> None:
            task = self.loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(lambda _: self._end_task(task, result))
            result.add_done_callback(
                lambda done: self.loop.call_soon_threadsafe(task.cancel) if done.cancelled() else None
            )
            if self._is_closing:
                task.cancel()

        self.loop.call_soon_threadsafe(begin)
        return result

    def fail(self, error: Exception) -> None:
        """Raises this error in everything that waits on this seat."""
        for result in list(self._results):
            with suppress(InvalidStateError):  # it is done
                result.set_exception(error)

    def declare_stuck(self) -> None:
        """Gives up the shared thread: a step of this engine does not end, so no other step will run."""
        self._shared.lose()

    def leave(self) -> None:
        """Cancels what was started through this seat, without waiting for its end."""
        self._shared.seats.discard(self)
        self._turn.leave()
        if self._was_used and not self._shared.is_lost:
            try:
                self.loop.call_soon_threadsafe(self._end_all)
            except RuntimeError:  # the thread has ended, and all that ran there
                self._ended.set()

    def close(self, seconds: float | None = None) -> bool:
        """Cancels what was started through this seat and waits for its end. Returns whether it ended within
        `seconds`, not counting other models' turns."""
        self.leave()
        if not self._was_used:
            return True
        while not self._ended.wait(_LOOK_SECONDS):
            if seconds is not None and not self._turn.is_anothers:
                seconds -= _LOOK_SECONDS
            if seconds is not None and seconds <= 0:
                self._shared.lose()
            if self._shared.is_lost:
                return False
        return True

    def _end_all(self) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        self._note_end()

    def _end_task(self, task: asyncio.Task[T], result: Future[T]) -> None:
        self._tasks.discard(task)
        self._note_end()
        if task.cancelled():
            result.cancel()
            return
        error = task.exception()
        with suppress(InvalidStateError):  # nobody waits for it any more
            if error is None:
                result.set_result(task.result())
                return
            if not isinstance(error, Exception):
                stopped = DeviceTaskError(f"it was ended by {error!r}")
                stopped.__cause__ = error
                error = stopped
            result.set_exception(error)

    def _note_end(self) -> None:
        if self._is_closing and not self._tasks:
            self._ended.set()


def _load_alone(
    config: EngineConfig, while_reading: AbstractContextManager[None] | None = None
) -> DeviceModel:
    """Loads a model once no other load runs. Raises ModelLoadError if a load that was given up does not end.
    Raises LoadGivenUpError if this load is given up while it waits."""
    with LOADING:
        return load_device_model(config, while_reading)


class SharedDevices:
    """The devices of several models. Each has one thread, which starts with its first model."""

    def __init__(self) -> None:
        self._shared: dict[torch.device, SharedDevice] = {}

    def seat(self, config: EngineConfig, weight: float) -> Seat:
        """A seat on the configured device. Raises ModelLoadError, and ValueError for an invalid weight."""
        device = choose_device(config.device)
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        shared = self._shared.get(device)
        if shared is not None and not shared.seats and shared.threads != config.threads:
            shared.close()
            shared = None
        if shared is None or shared.is_lost:
            shared = self._shared[device] = SharedDevice(device, config.threads)
        return shared.seat(weight, config.threads)

    def close(self) -> None:
        """Ends the threads, once no engine is left."""
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()
