"""How a process is asked to end or to show its stacks, and how it ends at once if it must."""

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

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
