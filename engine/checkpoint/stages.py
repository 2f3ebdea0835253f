"""The stages of loads: a load that was given up ends at its next stage, and one load at a time goes on."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from maxsimd.engine.errors import ModelLoadError

# A load that was given up has this long to end. Later loads then wait no more for it.
GIVEN_UP_SECONDS = 30.0
# A load that waits looks this often whether it was given up.
_LOOK_SECONDS = 0.1


class LoadGivenUpError(Exception):
    """Nobody waits for the model any more."""


class StagedLoad:
    """A load that can be given up, from any thread. It then ends at its next stage."""

    def __init__(self) -> None:
        # The time (monotonic) when it was given up.
        self._given_up_at: float | None = None
        # The thread that it runs on, while it does.
        self._thread_id: int | None = None

    @property
    def is_given_up(self) -> bool:
        return self._given_up_at is not None

    @property
    def is_stuck(self) -> bool:
        """Whether it was given up so long ago that it should have ended."""
        return self._given_up_at is not None and time.monotonic() - self._given_up_at >= GIVEN_UP_SECONDS

    @property
    def is_running(self) -> bool:
        return self._thread_id is not None

    def give_up(self) -> None:
        """Ends the load at its next stage."""
        if self._given_up_at is None:
            self._given_up_at = time.monotonic()

    def interrupt(self) -> None:
        """Ends the load inside of a stage, as soon as its thread runs Python code. Only for a process that
        exits: locks and settings of libraries are left as they are."""
        self.give_up()
        if (thread_id := self._thread_id) is not None:
            error = ctypes.py_object(LoadGivenUpError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), error)

    def check(self) -> None:
        """Raises LoadGivenUpError if it was given up."""
        if self.is_given_up:
            raise LoadGivenUpError

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Makes it the load whose stages this thread goes through."""
        _here.load = self
        self._thread_id = threading.get_ident()
        try:
            yield
        finally:
            self._thread_id = None
            _here.load = None


# The `load` that runs on this thread, if any.
_here = threading.local()


def next_stage() -> None:
    """Raises LoadGivenUpError if the load that runs on this thread was given up."""
    if (load := getattr(_here, "load", None)) is not None:
        load.check()


class LoadLock:
    """A reentrant lock that one load holds at a time. A waiting load can be given up. It waits at most
    `GIVEN_UP_SECONDS` for a load that was given up."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._holder: StagedLoad | None = None

    def __enter__(self) -> None:
        """Raises LoadGivenUpError, and ModelLoadError if the load that holds it is stuck."""
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            next_stage()
            holder = self._holder
            if holder is not None and holder.is_stuck:
                raise ModelLoadError(
                    "another model's load was given up and is stuck, which keeps this one from being loaded; "
                    "restart the process"
                )
        self._depth += 1
        self._holder = getattr(_here, "load", None)

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
        self._lock.release()


# While a model loads, settings of the whole process are changed (transformers' log, how checkpoints are read,
# the number of threads), so models are loaded and prepared one after the other.
LOADING = LoadLock()
