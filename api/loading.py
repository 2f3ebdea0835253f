"""Loading the model: at the start, and again after the engine has died.

The file `serve.py` beside this one says when; what becomes of requests meanwhile is the state's business.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from maxsimd.api.flags import in_flags
from maxsimd.api.served import Serving
from maxsimd.api.signals import Stop, leave_at_once
from maxsimd.api.state import ServerState
from maxsimd.engine import ModelLoadError

log = logging.getLogger("maxsimd.serve")

# The engine is not started again after this many deaths within this many seconds.
_MOST_DEATHS, _WITHIN_SECONDS = 5, 600.0
# What takes longer than this, and this many times as long as the first load did, will never be loaded again.
_LEAST_LOAD_SECONDS, _BEYOND_FIRST_LOAD = 60.0, 10.0
# While a model is loaded, the log says so this often, in seconds.
_TOLD_EVERY = 5.0
# The loop counts the seconds of a load itself: time in which the process did not run is none.
_TICK_SECONDS = 1.0


class Deaths:
    """The latest deaths of an engine, a start that failed being one too, and what follows from them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_MOST_DEATHS)

    def note(self) -> float | None:
        """Notes one; returns for how many seconds to wait before the next start: 1, and twice as many after
        each that came within the time in which they count. None where there were too many."""
        now = self._clock()
        self._times.append(now)
        recent = sum(now - each < _WITHIN_SECONDS for each in self._times)
        return None if recent == _MOST_DEATHS else 2.0 ** (recent - 1)


class Loading:
    """Loads the server's model, and remembers how long that took and how often the engine has died since."""

    def __init__(self, engine: Serving, stop: Stop, deaths: Deaths) -> None:
        self._engine = engine
        self._stop = stop
        self._deaths = deaths
        self._first_seconds = 0.0

    async def first(self) -> bool:
        """Whether the model could be loaded. A signal ends the process meanwhile: nothing has been promised
        to anyone."""
        begun = time.monotonic()
        start = await self._start(None)
        if not start.done():
            log.info("stopped while loading")
            leave_at_once(0)
        self._first_seconds = time.monotonic() - begun
        return _succeeded(start)

    async def again(self, state: ServerState) -> bool:
        """Starts an engine that has died, and once more where that fails. Returns whether it runs: not once a
        signal has come, nor once the engine is given up, after which it does not come back."""
        allowed = max(_LEAST_LOAD_SECONDS, _BEYOND_FIRST_LOAD * self._first_seconds)
        while True:
            pause = self._deaths.note()
            if self._engine.restart_obstacle is not None:
                return _give_up(state, self._engine.restart_obstacle)
            if pause is None:
                return _give_up(state, f"it died {_MOST_DEATHS} times in {_WITHIN_SECONDS / 60:.0f} minutes")
            log.warning("the engine is started again in %.0f s", pause)
            if await self._stop.asked_within(pause):
                return False
            start = await self._start(allowed)
            if start.done():
                if _succeeded(start):
                    return True
                continue
            start.cancel()
            await asyncio.wait({start})
            if self._stop.is_asked:
                return False
            return _give_up(state, f"loading its model takes longer than {allowed:.0f} s")

    async def _start(self, allowed: float | None) -> asyncio.Task[None]:
        """Starts the engine; returns when it runs, or could not be started, or a signal has come, or as many
        seconds have passed."""
        start = asyncio.create_task(self._engine.start())
        asked = asyncio.create_task(self._stop.asked())
        seconds = 0.0
        while not start.done() and not asked.done() and (allowed is None or seconds < allowed):
            await asyncio.wait({start, asked}, timeout=_TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            seconds += _TICK_SECONDS
            if not start.done() and seconds % _TOLD_EVERY == 0:
                log.info("loading the model, %.0f s so far", seconds)
        asked.cancel()
        return start


def _give_up(state: ServerState, reason: str) -> bool:
    log.error("the engine is not started again: %s", reason)
    state.comes_back = False
    return False


def _succeeded(start: asyncio.Task[None]) -> bool:
    try:
        start.result()
    except ModelLoadError as error:
        log.error("%s", in_flags(str(error)))
        return False
    except Exception as error:
        log.error(
            "the model cannot be loaded: %s: %s (--log-level debug says where)", type(error).__name__, error
        )
        log.debug("loading failed", exc_info=error)
        return False
    return True
