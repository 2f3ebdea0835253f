"""Whether what is asked for again fits into a cache: if not, the log says so, and what to change."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from maxsimd.engine.cache.memory import MemoryStore

log = logging.getLogger(__name__)

# What is put in is judged this many at a time; of these, so large a share had been put in before.
_JUDGED, _SHARE = 1000, 0.5
_SECONDS_BETWEEN_WARNINGS = 3600.0
_MIB = 1024 * 1024


class FitWatch:
    """Looks at what a store counts, and warns where most of what is put in has been there before and had to
    go. `what` is put in; `advice` says what else there is to do. Thread-safe."""

    def __init__(
        self,
        memory: MemoryStore[Any],
        what: str,
        advice: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._what = what
        self._advice = advice
        self._clock = clock
        self._lock = threading.Lock()
        self._puts = self._returned = 0
        self._silent_until = clock()

    def look(self) -> None:
        """To be called whenever something has been put in."""
        with self._lock:
            puts, returned = self._memory.puts - self._puts, self._memory.returned - self._returned
            if puts < _JUDGED:
                return
            self._puts, self._returned = self._memory.puts, self._memory.returned
            if returned < _SHARE * puts or self._clock() < self._silent_until:
                return
            self._silent_until = self._clock() + _SECONDS_BETWEEN_WARNINGS
        log.warning(
            "the cache of %d MiB is too small for what is asked for again: of the last %d %s, %d had been in "
            "it before and had to go; %s",
            self._memory.limit // _MIB,
            puts,
            self._what,
            returned,
            self._advice,
        )
