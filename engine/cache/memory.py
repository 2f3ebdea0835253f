"""A store in memory that keeps what is requested most often."""

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

# A key counts in one cell of each row. The least of its cells is nearest the truth.
_ROWS = 4
_MOST = 255
_MASK_64 = (1 << 64) - 1
# An odd number with its bits well mixed (2^64 divided by the golden ratio).
_STRIDE = 0x9E3779B97F4A7C15
_HALVED = bytes(count // 2 for count in range(256))


class FrequencySketch:
    """Counts requests of keys. Counts are never too low; they are too high if other keys share all of a key's
    cells. Not thread-safe.

    Source: count-min sketch with conservative update and halving, as in TinyLFU (Einziger, Friedman and
    Manes, ACM Transactions on Storage 13(4), 2017)."""

    def __init__(self, cells: int) -> None:
        """`cells` in a row: a power of two."""
        self._mask = cells - 1
        self._rows = [bytearray(self._mask + 1) for _ in range(_ROWS)]
        self._counted = 0

    def count(self, key: bytes, period: int) -> None:
        """Counts a key. After `period` keys all counts are halved, so that new ones weigh more."""
        cells = self._cells(key)
        least = min(row[cell] for row, cell in zip(self._rows, cells, strict=True))
        if least < _MOST:
            for row, cell in zip(self._rows, cells, strict=True):
                if row[cell] == least:
                    row[cell] = least + 1
        self._counted += 1
        if self._counted >= period:
            self._counted //= 2
            self._rows = [row.translate(_HALVED) for row in self._rows]

    def grow(self, cells: int) -> None:
        """Grows to that many cells in a row, a power of two. Estimates stay."""
        times = cells // (self._mask + 1)
        if times > 1:
            self._mask = cells - 1
            self._rows = [row * times for row in self._rows]

    def estimate(self, key: bytes) -> int:
        return min(row[cell] for row, cell in zip(self._rows, self._cells(key), strict=True))

    def _cells(self, key: bytes) -> list[int]:
        mixed = hash(key) & _MASK_64
        cells = []
        for _ in range(_ROWS):
            mixed = (mixed * _STRIDE + 1) & _MASK_64
            cells.append((mixed >> 32) & self._mask)
        return cells


class Entry(Protocol):
    @property
    def nbytes(self) -> int: ...


E = TypeVar("E", bound=Entry)

# The share of the newest entries, so that they can be requested again before they compete with others.
_WINDOW_SHARE = 0.01
# Cells in a row of the sketch for each entry: other keys are requested too.
_CELLS_AN_ENTRY, _FEWEST_CELLS = 16, 16_384
# Counts are halved after this many requests for each entry.
_REQUESTS_AN_ENTRY, _FEWEST_ENTRIES = 8, 1000
# The least requested of this many random entries is evicted.
_DRAWN = 8


class MemoryStore(Generic[E]):
    """Holds at most `limit` bytes of entries. Thread-safe.

    An entry that leaves the window of the newest replaces entries that are requested less often, each the
    least of a few random ones. If one of these is requested as often, the new entry is dropped. So a scan
    over many documents evicts none that are requested again, and a loop over more than fits still hits what
    fits.

    Sources: W-TinyLFU (Einziger, Friedman and Manes, ACM Transactions on Storage 13(4), 2017), with the
    main part of Ristretto's SampledLFU (https://github.com/hypermodeinc/ristretto)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._most_in_window = int(limit * _WINDOW_SHARE)
        # Least recently used first.
        self._window: OrderedDict[bytes, E] = OrderedDict()
        self._main: dict[bytes, E] = {}
        # The keys of the main part as a list to draw from, and the index of each in it.
        self._main_keys: list[bytes] = []
        self._positions: dict[bytes, int] = {}
        self._draw = random.Random(0)
        self._window_bytes, self._main_bytes = 0, 0
        self._requests = FrequencySketch(_FEWEST_CELLS)
        self._lock = threading.Lock()
        self.evictions = 0
        # Entries that were put in, and those among them that had been requested more than once by then.
        self.puts = self.returned = 0

    @property
    def nbytes(self) -> int:
        return self._window_bytes + self._main_bytes

    def __len__(self) -> int:
        return len(self._window) + len(self._main)

    def get(self, key: bytes) -> E | None:
        """Returns an entry, or None. Counts a request of the key."""
        with self._lock:
            self._requests.count(key, _REQUESTS_AN_ENTRY * max(len(self), _FEWEST_ENTRIES))
            if (entry := self._window.get(key)) is not None:
                self._window.move_to_end(key)
                return entry
            return self._main.get(key)

    def peek(self, key: bytes) -> E | None:
        """Like `get`, without counting."""
        with self._lock:
            return self._window.get(key) or self._main.get(key)

    def put(self, key: bytes, entry: E) -> None:
        """Keeps an entry, unless it exceeds the limit alone or others are requested more often."""
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
        """Changes the limit, and evicts at once what exceeds it."""
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
            victim = self._least_requested()
            assert victim is not None, "the window alone is never over the limit"
            self._remove(victim)
            self.evictions += 1

    def _admit(self, key: bytes, entry: E) -> None:
        """Moves an entry to the main part if it is requested more often than each entry that must go."""
        requests = self._requests.estimate(key)
        gone: dict[bytes, E] = {}
        while self.nbytes + entry.nbytes > self.limit:
            victim = self._least_requested()
            if victim is None or self._requests.estimate(victim) >= requests:
                self.evictions += 1
                for each, other in gone.items():
                    self._add(each, other)
                return
            gone[victim] = self._main[victim]
            self._remove(victim)
        self._add(key, entry)
        self.evictions += len(gone)

    def _least_requested(self) -> bytes | None:
        if not self._main:
            return None
        drawn = [self._draw.choice(self._main_keys) for _ in range(_DRAWN)]
        return min(drawn, key=self._requests.estimate)

    def _add(self, key: bytes, entry: E) -> None:
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


log = logging.getLogger(__name__)

# Warn if this share of the last so many entries had been evicted before.
_JUDGED, _SHARE = 1000, 0.5
_SECONDS_BETWEEN_WARNINGS = 3600.0
_MIB = 1024 * 1024


class CacheSizeWatch:
    """Warns if most new entries of a store had been evicted from it before. `what` names the entries, and
    `advice` says what to change. Thread-safe."""

    def __init__(
        self, memory: MemoryStore[Any], what: str, advice: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = memory
        self._what = what
        self._advice = advice
        self._clock = clock
        self._lock = threading.Lock()
        self._puts = self._returned = 0
        self._silent_until = clock()

    def check(self) -> None:
        """To be called after each `put`."""
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
