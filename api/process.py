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
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from maxsimd.engine.device.host import give_back_memory

log = logging.getLogger("maxsimd.serve")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STANDARD_ERROR = 2
# How much longer than its grace a server may take to free what it has.
_MARGIN_SECONDS = 5.0


def leave_at_once(status: int) -> NoReturn:
    """Ends the process whatever its threads do."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def handled_signals() -> list[signal.Signals]:
    """The signals that end a server: not SIGHUP where it is ignored, as `nohup` has it."""
    return [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]


def show_stacks_when_asked(also: Callable[[], None] | None = None) -> None:
    """SIGUSR1 writes the stacks of all threads to standard error, whatever they do, and ends nothing. The
    running event loop then calls `also`."""
    faulthandler.unregister(signal.SIGUSR1)
    if also is not None:
        import asyncio

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, also)
    faulthandler.register(signal.SIGUSR1, file=_STANDARD_ERROR, all_threads=True, chain=also is not None)


@contextmanager
def leaving_when_asked() -> Iterator[None]:
    """A signal ends the process at once and well, because it has taken no request yet."""
    before = {number: signal.signal(number, lambda *_: leave_at_once(0)) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """The wish that a server ends, once a signal has come. For `drain` seconds after SIGTERM and SIGHUP it
    still accepts work, so that load balancers notice; `grace` seconds later, at the `deadline` (event loop's
    time), requests must be done. SIGINT skips the drain. A second signal ends the process at once, and so
    does a server that is not done some seconds after its deadline."""

    def __init__(self, grace: float, drain: float = 0.0) -> None:
        import asyncio  # late: the command line says what it loads before this is imported

        self._loop = asyncio.get_running_loop()
        self._grace, self._drain = grace, drain
        self._drained = asyncio.Event()
        self._asked = asyncio.Event()
        self._watchdog: threading.Timer | None = None
        self.deadline = 0.0
        for number in handled_signals():
            self._loop.add_signal_handler(number, self._ask, number)

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    async def asked(self) -> None:
        await self._asked.wait()

    async def asked_within(self, seconds: float) -> bool:
        """Waits for a signal for so long; says whether one has come."""
        import asyncio

        try:
            async with asyncio.timeout(seconds):
                await self._asked.wait()
        except TimeoutError:
            return False
        return True

    async def drained(self) -> None:
        """Returns when the drain is over."""
        await self._drained.wait()

    def begin(self, status: int, drain: float = 0.0) -> None:
        """Starts the drain and the grace period, after which the process ends with `status` in any case."""
        if self._watchdog is None:
            self._loop.call_later(drain, self._drained.set)
            self.deadline = self._loop.time() + drain + self._grace
            # In a thread of its own, for the event loop may be what does not go on.
            seconds = drain + self._grace + _MARGIN_SECONDS
            self._watchdog = threading.Timer(seconds, leave_at_once, [status])
            self._watchdog.daemon = True
            self._watchdog.start()

    def done(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _ask(self, number: signal.Signals) -> None:
        if self._asked.is_set():
            log.warning("stopped at once by a second signal")
            leave_at_once(128 + number)
        self.begin(0, 0.0 if number == signal.SIGINT else self._drain)
        self._asked.set()


# How long a thread may hold Python's lock while another wants it. Python's own 5 ms are too long: the device
# thread takes the lock after each operation, also while a large request is being prepared. By
# `maxsimd bench crowd` a small request waits twice as long with 0.5 ms as with 0.1; less gains nothing.
_SWITCH_SECONDS = 0.0001


@contextmanager
def switching_often() -> Iterator[None]:
    """Threads take turns at Python's lock often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# How often OpenMP's threads look whether the others are ready before they sleep: for a tenth of a
# millisecond, which is longer than most of what is done between two layers. On a quiet machine that costs a
# hundredth or two of throughput beside five times as long; by `maxsimd bench neighbours` it leaves a server
# its share beside one busy neighbour, and by `maxsimd bench overload` it halves what refusals cost.
_SPINS = "2000"


def waiting_threads_sleep() -> None:
    """Has OpenMP's threads sleep when they wait for each other, unless the environment says how they wait. To
    be called before torch is imported.

    By default they look for tens of milliseconds, which nobody else can use: where other processes keep the
    cores busy, a thread spends its share of them on waiting for one that has not got its own yet."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def open_standard_files() -> None:
    """Opens /dev/null as standard input, output and error where these are closed. Otherwise sockets get their
    numbers, and libuv aborts when it closes one."""
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
    """Has threads share heaps, of which there are no more from now on than `threads` that can run at the same
    time, unless the environment says how many. By default there are up to eight for each core of the machine,
    and each has gaps of its own: under `tests.chaos fuzz` a server grows by half as much with two."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, max(_LEAST, threads))


# More collections of young objects than there ever are between two full ones.
_NEVER = 1_000_000_000
_LOOK_SECONDS = 0.25
# Between two full collections passes this many times as long as the first took: with a full cache of
# embeddings in memory it is a tenth of a second.
_REST = 200
# While the server is always busy there is one after this long, or once the process has grown by so much: what
# is not freed may be bodies of requests that failed.
_LONGEST_SECONDS = 60.0
_GROWN_BYTES = 128 << 20


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """What there is by now is not walked through any more, and what comes is only while it is young: with
    some 100,000 objects, which two requests of 10,000 documents have, all would stand still for tens of
    milliseconds, several times a second. For after a start, which leaves very many objects behind; full
    collections are up to `collect_when_quiet`."""
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
    """Has all that has outlived its youth walked through when `is_quiet`, for as long as this runs; now and
    then anyway where it never is. `resident` is how many bytes the process has in memory."""
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
    """How many bytes of this process are in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
