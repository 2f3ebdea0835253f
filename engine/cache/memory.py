"""Embeddings or scores in memory. When it is full, those stay that are asked for more often."""

import random
import threading
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from maxsimd.engine.cache.frequency import FrequencySketch


class Entry(Protocol):
    """What is kept, and the memory that it takes."""

    @property
    def nbytes(self) -> int: ...


E = TypeVar("E", bound=Entry)

# Of the limit, what the newest entries have for themselves, so that they can be asked for again before they
# are compared with others.
_WINDOW_SHARE = 0.01
# For each entry that is there a sketch has this many cells in a row: others are asked for too.
_CELLS_AN_ENTRY, _FEWEST_CELLS = 16, 16_384
# Counts are halved after this many requests for each entry, of which there are taken to be this many or more.
_REQUESTS_AN_ENTRY, _FEWEST_ENTRIES = 8, 1000
# Of how many, drawn at random, the one that is asked for least has to go.
_DRAWN = 8


class MemoryStore(Generic[E]):
    """Holds at most `limit` bytes of entries. Thread-safe.

    An entry that no longer fits into the window of the newest takes the place of others that are asked for
    less often, each the least of a few that are drawn at random; where one of these is asked for as often,
    the entry goes itself. A scan over many documents therefore leaves those in place that are asked for
    again, and a loop over more than fits hits what does fit. (Were those to go that were asked for longest
    ago, one wrong choice in a loop would be followed by another each time that the loop comes to what had to
    go.)

    Sources: W-TinyLFU (Einziger, Friedman and Manes, ACM Transactions on Storage 13(4), 2017), whose main
    part here is Ristretto's SampledLFU (https://github.com/hypermodeinc/ristretto)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._most_in_window = int(limit * _WINDOW_SHARE)
        # In the order of their last use.
        self._window: OrderedDict[bytes, E] = OrderedDict()
        self._main: dict[bytes, E] = {}
        # The keys of the main part in a list, since one cannot draw from a dict, and the place of each in it.
        self._main_keys: list[bytes] = []
        self._positions: dict[bytes, int] = {}
        self._draw = random.Random(0)
        self._window_bytes, self._main_bytes = 0, 0
        self._requests = FrequencySketch(_FEWEST_CELLS)
        self._lock = threading.Lock()
        self.evictions = 0
        # How many entries were put in, and how many of them had been asked for more than once by then, and so
        # been in before, or not let in.
        self.puts = self.returned = 0

    @property
    def nbytes(self) -> int:
        return self._window_bytes + self._main_bytes

    def __len__(self) -> int:
        return len(self._window) + len(self._main)

    def get(self, key: bytes) -> E | None:
        """An entry, None where there is none; either way its key was asked for once more."""
        with self._lock:
            self._requests.count(key, _REQUESTS_AN_ENTRY * max(len(self), _FEWEST_ENTRIES))
            if (entry := self._window.get(key)) is not None:
                self._window.move_to_end(key)
                return entry
            return self._main.get(key)

    def peek(self, key: bytes) -> E | None:
        """The same without counting."""
        with self._lock:
            return self._window.get(key) or self._main.get(key)

    def put(self, key: bytes, entry: E) -> None:
        """Keeps an entry, unless it alone is more than the store takes or others are asked for more often."""
        if entry.nbytes > self.limit:
            return
        with self._lock:
            self.puts += 1
            self.returned += bool(self.evictions) and self._requests.estimate(key) > 1
            self._remove(key)
            self._window[key] = entry
            self._window_bytes += entry.nbytes
            self._shrink_window()
            self._evict()
            self._requests.grow(1 << (_CELLS_AN_ENTRY * len(self)).bit_length())

    def resize(self, limit: int) -> None:
        """Holds at most `limit` bytes from now on; what is asked for least goes at once."""
        with self._lock:
            self.limit = limit
            self._most_in_window = int(limit * _WINDOW_SHARE)
            self._shrink_window()
            self._evict()

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        with self._lock:
            for part in (self._window, self._main, self._main_keys, self._positions):
                part.clear()
            self._window_bytes = self._main_bytes = 0

    def _shrink_window(self) -> None:
        while self._window_bytes > self._most_in_window:
            oldest, leaving = self._window.popitem(last=False)
            self._window_bytes -= leaving.nbytes
            self._admit(oldest, leaving)

    def _evict(self) -> None:
        while self.nbytes > self.limit:
            victim = self._least_asked_for()
            assert victim is not None, "the window alone is never over the limit"
            self._remove(victim)
            self.evictions += 1

    def _admit(self, key: bytes, entry: E) -> None:
        """Moves an entry to the main part, if it is asked for more often than each that has to go."""
        requests = self._requests.estimate(key)
        gone: dict[bytes, E] = {}
        while self.nbytes + entry.nbytes > self.limit:
            victim = self._least_asked_for()
            if victim is None or self._requests.estimate(victim) >= requests:
                self.evictions += 1
                for each, other in gone.items():
                    self._add(each, other)
                return
            gone[victim] = self._main[victim]
            self._remove(victim)
        self._add(key, entry)
        self.evictions += len(gone)

    def _least_asked_for(self) -> bytes | None:
        """Of some in the main part; None where there are none."""
        if not self._main:
            return None
        drawn = [self._draw.choice(self._main_keys) for _ in range(_DRAWN)]
        return min(drawn, key=self._requests.estimate)

    def _add(self, key: bytes, entry: E) -> None:
        """To the main part."""
        self._main[key] = entry
        self._main_bytes += entry.nbytes
        self._positions[key] = len(self._main_keys)
        self._main_keys.append(key)

    def _remove(self, key: bytes) -> None:
        if (entry := self._window.pop(key, None)) is not None:
            self._window_bytes -= entry.nbytes
        if (entry := self._main.pop(key, None)) is not None:
            self._main_bytes -= entry.nbytes
            position, last = self._positions.pop(key), self._main_keys.pop()
            if last != key:
                self._main_keys[position], self._positions[last] = last, position
