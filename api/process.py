"""A serving process: signals, threads and standard files, and when memory is collected and given back."""

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from maxsimd.engine.workers import give_back_memory

log = logging.getLogger("maxsimd.serve")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STANDARD_ERROR = 2
# Time beyond the grace to free everything.
_MARGIN_SECONDS = 5.0
# Time for the last lines of output, which nobody may read.
_FLUSH_SECONDS = 1.0


def exit_at_once(status: int) -> NoReturn:
    """Ends the process whatever its threads do, and whether or not its output is read."""
    with suppress(RuntimeError):  # the system has no thread to give
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
    os._exit(status)


def _flush() -> None:
    with suppress(Exception):  # the output is full or closed
        logging.shutdown()
        sys.stdout.flush()


def handled_signals() -> list[signal.Signals]:
    """The signals that end a server. SIGHUP is left out if it is ignored, as `nohup` does."""
    return [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]


def show_stacks_on_sigusr1(also: Callable[[], None] | None = None) -> None:
    """Makes SIGUSR1 write all threads' stacks to standard error. The running event loop then calls `also`."""
    faulthandler.unregister(signal.SIGUSR1)
    if also is not None:
        import asyncio

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, also)
    faulthandler.register(signal.SIGUSR1, file=_STANDARD_ERROR, all_threads=True, chain=also is not None)


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """A signal ends the process at once with status 0, because it has taken no request yet."""
    before = {number: signal.signal(number, lambda *_: exit_at_once(0)) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """Handles the signals that end a server. For `drain` seconds after SIGTERM and SIGHUP it still takes
    work, so that load balancers notice. SIGINT skips that. `grace` seconds later, at the `deadline` (event
    loop's time), requests must be done. A second signal ends the process at once, and so does a server that
    is not done some seconds after the deadline. With `is_led` a supervisor handles further signals: one that
    was sent to all processes comes from it once more."""

    def __init__(self, grace: float, drain: float = 0.0, is_led: bool = False) -> None:
        import asyncio  # late: the command line says what it loads before this is imported

        self._loop = asyncio.get_running_loop()
        self._grace, self._drain, self._is_led = grace, drain, is_led
        self._drained = asyncio.Event()
        self._signaled = asyncio.Event()
        self._watchdog: threading.Timer | None = None
        self.deadline = 0.0
        for number in handled_signals():
            self._loop.add_signal_handler(number, self._handle_signal, number)

    @property
    def is_signaled(self) -> bool:
        return self._signaled.is_set()

    async def signaled(self) -> None:
        await self._signaled.wait()

    async def signaled_within(self, seconds: float) -> bool:
        """Whether a signal comes within `seconds`."""
        import asyncio

        with suppress(TimeoutError):
            await asyncio.wait_for(self._signaled.wait(), seconds)
        return self.is_signaled

    async def drained(self) -> None:
        await self._drained.wait()

    def begin(self, status: int, drain: float = 0.0) -> None:
        """Starts the drain and the grace period. The process ends with `status` after both in any case."""
        if self._watchdog is None:
            self._loop.call_later(drain, self._drained.set)
            self.deadline = self._loop.time() + drain + self._grace
            # A thread, because the event loop may be stuck.
            seconds = drain + self._grace + _MARGIN_SECONDS
            self._watchdog = threading.Timer(seconds, exit_at_once, [status])
            self._watchdog.daemon = True
            self._watchdog.start()

    def done(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _handle_signal(self, number: signal.Signals) -> None:
        if self._signaled.is_set():
            if self._is_led:
                return
            log.warning("stopped at once by a second signal")
            exit_at_once(128 + number)
        self.begin(0, 0.0 if number == signal.SIGINT else self._drain)
        self._signaled.set()


# Python's own 5 ms are too long: the device thread takes the lock after each operation, also while a large
# request is being prepared. By `maxsimd bench crowd` a small request waits twice as long with 0.5 ms as with
# 0.1; less gains nothing.
_SWITCH_SECONDS = 0.0001


@contextmanager
def frequent_thread_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# Spin for a tenth of a millisecond, longer than most gaps between layers. On a quiet machine five times as
# long gains 1% to 2% of throughput; by `maxsimd bench neighbours` this leaves a server its share beside one
# busy neighbour, and by `maxsimd bench overload` it halves the cost of refusals.
_SPINS = "2000"


def let_waiting_threads_sleep() -> None:
    """Makes OpenMP's threads sleep while they wait for each other, unless the environment says how they wait.
    Call it before torch is imported. By default they spin for tens of milliseconds, which takes cores from
    other processes and from the threads that they wait for."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def open_standard_files() -> None:
    """Opens /dev/null for closed standard files: libuv aborts when it closes a socket with their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


# See mallopt(3).
_M_ARENA_MAX = -8
_LEAST = 2


def share_heaps(threads: int) -> None:
    """Limits glibc to one heap for each of `threads`, unless the environment says otherwise. The default is
    eight for each core, each with its own gaps: under `tests.chaos fuzz` a server grows by half as much with
    two."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, max(_LEAST, threads))


# More than there ever are between two full collections.
_NEVER = 1_000_000_000
_LOOK_SECONDS = 0.25
# Pause between full collections, in multiples of the last one's time: a tenth of a second with a full cache
# in memory.
_REST = 200
# A busy server collects after this long, or when it has grown by this much: failed requests may keep their
# bodies.
_LONGEST_SECONDS = 60.0
_GROWN_BYTES = 128 << 20


@contextmanager
def postponed_garbage_collection() -> Iterator[None]:
    """Freezes the objects of a start, and leaves full collections to `collect_when_quiet`. A collection stops
    all threads: with the 100,000 objects of two large requests, for tens of milliseconds several times a
    second."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def collect_when_quiet(is_quiet: Callable[[], bool], resident: Callable[[], int]) -> None:
    """Collects garbage fully while `is_quiet`, and now and then anyway, until cancelled. Then gives free
    memory back to the system. `resident` returns the bytes of the process in memory."""
    import asyncio

    now = asyncio.get_running_loop().time
    last, took, least_bytes = now(), 0.0, resident()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        has_aged = gc.get_count()[2] > 0
        is_late = now() - last > _LONGEST_SECONDS
        least_bytes = min(least_bytes, resident())
        has_grown = resident() - least_bytes > _GROWN_BYTES
        if now() - last > _REST * took and (has_grown or (has_aged and (is_late or is_quiet()))):
            begun = now()
            gc.collect()
            last, took = now(), now() - begun
            await asyncio.to_thread(give_back_memory)
            least_bytes = resident()


def resident_bytes() -> int:
    """Bytes of this process in memory; 0 if the system does not say."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
