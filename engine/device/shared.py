"""A device whose thread several engines share, and the seat of each on it."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from maxsimd.engine.actors.turns import Turn, Turns
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.load import DeviceModel, load_device_model, prepare_thread
from maxsimd.engine.device.thread import DeviceThread, ModelLoad, load_on_thread
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution import choose_device

T = TypeVar("T")

# How often a seat that is being closed looks whether it is still waited for in vain.
_LOOK_SECONDS = 0.05
# Loading changes, for a while, what there is but once in a process: torch's number of threads, functions of
# transformers.
_LOADING = threading.Lock()


class DeviceLostError(Exception):
    """The thread of a shared device is stuck with another model's step."""


class DeviceTaskError(Exception):
    """What ran for one engine would have ended the thread that all share."""


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

    All of them compute with as many threads as the first was configured to: the number is one thread's."""

    def __init__(self, device: torch.device, threads: int | None) -> None:
        self.device = device
        self.threads = threads
        self.turns = Turns()
        self.thread = _EnduringThread()
        self.is_lost = False
        self._seats: list[Seat] = []
        # Before anything else that runs there.
        self.thread.loop.call_soon_threadsafe(self._prepare_thread)

    def _prepare_thread(self) -> None:
        prepare_thread(self.device, self.threads)
        # From now on it is this thread's number, whatever loading sets in others.
        torch.set_num_threads(torch.get_num_threads())

    def seat(self, weight: float, threads: int | None) -> "Seat":
        """A seat for one more engine. Raises ModelLoadError where it is to compute with another number of
        threads."""
        if threads != self.threads:
            raise ModelLoadError(
                f"models of one process share the threads for computing: threads is {self.threads} for those "
                f"that are there, and {threads} for this one; set it alike for all"
            )
        seat = Seat(self, self.turns.join(weight))
        self._seats.append(seat)
        return seat

    @property
    def is_used(self) -> bool:
        return bool(self._seats)

    def forget(self, seat: "Seat") -> None:
        if seat in self._seats:
            self._seats.remove(seat)

    def lose(self) -> None:
        """Leaves the thread behind, which is stuck, and tells all who have a seat."""
        if self.is_lost:
            return
        self.is_lost = True
        self.thread.close(0)
        for seat in list(self._seats):
            seat.fail(DeviceLostError("the device's thread is stuck with a step of another model"))

    def close(self) -> None:
        if not self.is_lost:
            self.thread.close()


class Seat:
    """One engine's part of a shared device: as a `DeviceThread` to it, but closing it ends only what was
    started through it."""

    def __init__(self, shared: SharedDevice, turn: Turn) -> None:
        self._shared = shared
        self.turn: Turn | None = turn
        self._turn = turn
        self.loop = shared.thread.loop
        self._lock = threading.Lock()
        self._results: set[Future[Any]] = set()
        # Those on the device's loop, which alone touches them.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._was_used = self._is_closing = False
        self._ended = threading.Event()

    @property
    def seconds(self) -> float:
        """The time that the engine has used on the device."""
        return self._turn.seconds

    async def load(self, config: EngineConfig) -> DeviceModel:
        """Loads a model while others are served, one at a time: on a CPU in a thread of its own, and only to
        read the checkpoint it takes a turn; on a GPU all of it is done in a turn on the device's thread,
        since what others launch meanwhile could get into the graphs that are recorded. Raises
        ModelLoadError."""
        if self._shared.device.type == "cpu":
            loader, model = await load_on_thread(lambda: self._load(config))
            loader.close()
            return model
        load = ModelLoad(lambda: load_device_model(config))
        try:
            return await asyncio.wrap_future(self.run(self._load_in_turn(load)))
        except asyncio.CancelledError:
            load.give_up()
            with suppress(RuntimeError):  # the thread has ended meanwhile
                self.loop.call_soon_threadsafe(load.free)
            raise

    def _load(self, config: EngineConfig) -> DeviceModel:
        with _LOADING:
            return load_device_model(config, self._turn_held())

    async def _load_in_turn(self, load: ModelLoad) -> DeviceModel:
        async with self._turn:
            with _LOADING:
                return load.run()

    @contextmanager
    def _turn_held(self) -> Iterator[None]:
        """Keeps the device from running steps meanwhile: transformers sets torch's default precision, which
        is the whole process's, to the checkpoint's while it makes a model. For another thread than the
        device's. Whoever gives up the load has to wait no longer, but the turn ends with the reading."""
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
            with suppress(RuntimeError):  # the thread has ended meanwhile
                self.loop.call_soon_threadsafe(is_over.set)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the device thread."""
        result: Future[T] = Future()
        with self._lock:
            self._was_used = True
            self._results.add(result)
        result.add_done_callback(self._results.discard)

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
        """Has all who wait for something here get this error."""
        for result in list(self._results):
            with suppress(InvalidStateError):  # it is there already
                result.set_exception(error)

    def declare_stuck(self) -> None:
        """A step of this engine does not end: nobody else's will run on that thread either."""
        self._shared.lose()

    def leave(self) -> None:
        """Cancels what was started through this seat, without waiting for its end."""
        self._shared.forget(self)
        self._turn.leave()
        if self._was_used and not self._shared.is_lost:
            try:
                self.loop.call_soon_threadsafe(self._end_all)
            except RuntimeError:  # the thread has ended, and all that ran there
                self._ended.set()

    def close(self, seconds: float | None = None) -> bool:
        """Cancels what was started through this seat and waits for its end, for at most that many seconds in
        which no other model has its turn; says whether it ended."""
        self.leave()
        if not self._was_used:
            return True
        while not self._ended.wait(_LOOK_SECONDS):
            if seconds is not None and not self._turn.is_anothers:
                seconds -= _LOOK_SECONDS
            if self._shared.is_lost:
                return False
            if seconds is not None and seconds <= 0:
                self._shared.lose()
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
            elif isinstance(error, Exception):
                result.set_exception(error)
            else:
                stopped = DeviceTaskError(f"it was ended by {error!r}")
                stopped.__cause__ = error
                result.set_exception(stopped)

    def _note_end(self) -> None:
        if self._is_closing and not self._tasks:
            self._ended.set()


class SharedDevices:
    """The devices of several models, each with one thread, made when the first of them comes."""

    def __init__(self) -> None:
        self._shared: dict[torch.device, SharedDevice] = {}

    def seat(self, config: EngineConfig, weight: float) -> Seat:
        """A seat on the device that a configuration means. Raises ModelLoadError, and ValueError for a weight
        that means nothing."""
        device = choose_device(config.device)
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        shared = self._shared.get(device)
        if shared is not None and not shared.is_used and shared.threads != config.threads:
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
