"""Embeddings in memory. When it is full, those stay that are asked for more often."""

import threading
from collections import OrderedDict

from maxsimd.engine.cache.entry import CachedEmbedding
from maxsimd.engine.cache.frequency import FrequencySketch

# Of the limit, what the newest entries have for themselves, so that they can be asked for again before they
# are compared with others.
_WINDOW_SHARE = 0.01
# For each entry that is there a sketch has this many cells in a row: others are asked for too.
_CELLS_AN_ENTRY, _FEWEST_CELLS = 8, 1024
# Counts are halved after this many requests for each entry, of which there are taken to be this many or more.
_REQUESTS_AN_ENTRY, _FEWEST_ENTRIES = 8, 1000

_Entries = OrderedDict[bytes, CachedEmbedding]


class MemoryStore:
    """Holds at most `limit` bytes of embeddings. Thread-safe.

    An entry that no longer fits into the window of the newest takes the place of those that were asked for
    longest ago, if it was asked for more often than each of them; else it goes itself. A scan over many
    documents therefore leaves those in place that are asked for again, and a loop over more than fits hits
    what does fit.

    Source: W-TinyLFU (Einziger, Friedman and Manes, ACM Transactions on Storage 13(4), 2017), with one list
    for the main part."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._most_in_window = int(limit * _WINDOW_SHARE)
        # Both in the order of their last use.
        self._window: _Entries = OrderedDict()
        self._main: _Entries = OrderedDict()
        self._window_bytes, self._main_bytes = 0, 0
        self._requests = FrequencySketch(_FEWEST_CELLS)
        self._lock = threading.Lock()
        self.evictions = 0

    @property
    def nbytes(self) -> int:
        return self._window_bytes + self._main_bytes

    def __len__(self) -> int:
        return len(self._window) + len(self._main)

    def get(self, key: bytes) -> CachedEmbedding | None:
        """An entry, None where there is none; either way its key was asked for once more."""
        with self._lock:
            self._requests.count(key, _REQUESTS_AN_ENTRY * max(len(self), _FEWEST_ENTRIES))
            for entries in (self._main, self._window):
                entry = entries.get(key)
                if entry is not None:
                    entries.move_to_end(key)
                    return entry
            return None

    def put(self, key: bytes, entry: CachedEmbedding) -> None:
        """Keeps an entry, unless it alone is more than the store takes or others are asked for more often."""
        if entry.nbytes > self.limit:
            return
        with self._lock:
            self._remove(key)
            self._window[key] = entry
            self._window_bytes += entry.nbytes
            while self._window_bytes > self._most_in_window:
                oldest, leaving = self._window.popitem(last=False)
                self._window_bytes -= leaving.nbytes
                self._admit(oldest, leaving)
            while self.nbytes > self.limit:
                self._remove(next(iter(self._main)))
                self.evictions += 1
            self._requests.grow(1 << (_CELLS_AN_ENTRY * len(self)).bit_length())

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        with self._lock:
            self._window.clear()
            self._main.clear()
            self._window_bytes = self._main_bytes = 0

    def _admit(self, key: bytes, entry: CachedEmbedding) -> None:
        """Moves an entry to the main part, if it is worth more than all that would have to go."""
        victims, excess = [], self.nbytes + entry.nbytes - self.limit
        requests = self._requests.estimate(key)
        for each, other in self._main.items():
            if excess <= 0:
                break
            if self._requests.estimate(each) >= requests:
                self.evictions += 1
                return
            victims.append(each)
            excess -= other.nbytes
        if excess > 0:  # the window holds the rest
            self.evictions += 1
            return
        for victim in victims:
            self._remove(victim)
            self.evictions += 1
        self._main[key] = entry
        self._main_bytes += entry.nbytes

    def _remove(self, key: bytes) -> None:
        if (entry := self._main.pop(key, None)) is not None:
            self._main_bytes -= entry.nbytes
        if (entry := self._window.pop(key, None)) is not None:
            self._window_bytes -= entry.nbytes
