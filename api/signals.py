"""How a process is asked to end, and how it ends at once where nothing else is in time."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

log = logging.getLogger("maxsimd.serve")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How much longer than its grace a server may take to free what it has.
_MARGIN_SECONDS = 5.0


def leave_at_once(status: int) -> NoReturn:
    """Ends the process whatever its threads do."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


@contextmanager
def leaving_when_asked() -> Iterator[None]:
    """A signal ends the process at once and well, because it has taken no request yet."""
    before = {number: signal.signal(number, lambda *_: leave_at_once(0)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """The wish that a server ends, once a signal has come: `deadline` says by when requests must be done
    (event loop's time). A second signal ends the process at once, and so does a server that is not done some
    seconds after its deadline."""

    def __init__(self, grace: float) -> None:
        import asyncio  # late: the command line says what it loads before this is imported

        self._loop = asyncio.get_running_loop()
        self._grace = grace
        self._asked = asyncio.Event()
        self._watchdog: threading.Timer | None = None
        self.deadline = 0.0
        for number in SIGNALS:
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

    def begin(self, status: int) -> None:
        """Starts the grace period, after which the process ends with `status` in any case."""
        if self._watchdog is None:
            self.deadline = self._loop.time() + self._grace
            # In a thread of its own, for the event loop may be what does not go on.
            self._watchdog = threading.Timer(self._grace + _MARGIN_SECONDS, leave_at_once, [status])
            self._watchdog.daemon = True
            self._watchdog.start()

    def done(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _ask(self, number: signal.Signals) -> None:
        if self._asked.is_set():
            log.warning("stopped at once by a second signal")
            leave_at_once(128 + number)
        self.begin(0)
        self._asked.set()
