"""The caches of embeddings and scores, and their store in memory, which keeps what is requested most."""

import hashlib
import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.embeddings import (
    CachedEmbedding,
    CacheWriter,
    PendingEmbeddings,
    Precision,
    rounded,
)
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.pooling.ragged import Ragged

log = logging.getLogger(__name__)

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


E = TypeVar("E", bound="CachedEmbedding | CachedScore")

# The share of the newest entries, so that they can be requested again before they compete with others.
_WINDOW_SHARE = 0.01
# Cells in a row of the sketch for each entry: other keys are requested too.
_CELLS_PER_ENTRY, _FEWEST_CELLS = 16, 16_384
# Counts are halved after this many requests for each entry.
_REQUESTS_PER_ENTRY, _FEWEST_ENTRIES = 8, 1000
# The least requested of this many random entries is evicted.
_DRAWN = 8
# Warn if this share of the last so many entries had been evicted before.
_JUDGED, _SHARE = 1000, 0.5
_SECONDS_BETWEEN_WARNINGS = 3600.0
_MIB = 1024 * 1024


class MemoryStore(Generic[E]):
    """Holds at most `limit` bytes of entries. Thread-safe.

    An entry that leaves the window of the newest replaces entries that are requested less often, each the
    least of a few random ones. If one of these is requested as often, the new entry is dropped. So a scan
    over many documents evicts none that are requested again, and a loop over too many still hits some.

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
        # Entries that were put in since the last judgement of the size, and those among them that had been
        # requested more than once by then.
        self._puts = self._returned = 0
        self._silent_until = 0.0

    @property
    def nbytes(self) -> int:
        return self._window_bytes + self._main_bytes

    def __len__(self) -> int:
        return len(self._window) + len(self._main)

    def get(self, key: bytes) -> E | None:
        """Returns an entry, or None. Counts a request of the key."""
        with self._lock:
            self._requests.count(key, _REQUESTS_PER_ENTRY * max(len(self), _FEWEST_ENTRIES))
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
            self._puts += 1
            self._returned += bool(self.evictions) and self._requests.estimate(key) > 1
            self._remove(key)
            self._window[key] = entry
            self._window_bytes += entry.nbytes
            self._shrink_window()
            self._evict()
            self._requests.grow(1 << (_CELLS_PER_ENTRY * len(self)).bit_length())

    def resize(self, limit: int) -> None:
        """Changes the limit, and evicts at once what exceeds it."""
        with self._lock:
            self.limit = limit
            self._most_in_window = int(limit * _WINDOW_SHARE)
            self._shrink_window()
            self._evict()

    def warn_if_too_small(self, what: str, advice: str) -> None:
        """Warns if most new entries had been evicted before. `what` names the entries, and `advice` says what
        to change. To be called after each `put`."""
        with self._lock:
            puts, returned = self._puts, self._returned
            if puts < _JUDGED:
                return
            self._puts = self._returned = 0
            if returned < _SHARE * puts or time.monotonic() < self._silent_until:
                return
            self._silent_until = time.monotonic() + _SECONDS_BETWEEN_WARNINGS
        log.warning(
            "the cache of %d MiB is too small: %d of the last %d %s had been cached and were evicted; %s",
            self.limit // _MIB,
            returned,
            puts,
            what,
            advice,
        )

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


# The most bytes of embeddings that wait to be written.
STAGED_BYTES = 256 * 1024 * 1024
_ADVICE = (
    "raise cache_mb, name a folder for more of them (cache_dir), or have them in fewer bytes "
    '(cache_precision="int8")'
)


class _Cache(Generic[E]):
    """The store in memory of a cache, and counts of it."""

    def __init__(self, memory: MemoryStore[E]) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def count(self, hits: int, misses: int) -> None:
        with self._lock:
            self.hits += hits
            self.misses += misses

    def resize(self, limit: int) -> None:
        self._memory.resize(limit)

    @property
    def entries(self) -> int:
        return len(self._memory)

    @property
    def memory_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def evictions(self) -> int:
        return self._memory.evictions


class EmbeddingCache(_Cache[CachedEmbedding]):
    """Embeddings of documents of one model by key: memory first, then disk. Thread-safe.

    At start a thread reads the newest entries on disk into memory. `fingerprint` is the digest of the model
    and its options, since models may share a disk; it is empty without one. New embeddings are rounded to
    `precision` before use, so that a hit and a miss score identically. On a GPU the `slab`, set once before
    use, has a second copy of those in use."""

    def __init__(
        self,
        fingerprint: bytes,
        precision: Precision,
        memory: MemoryStore[CachedEmbedding],
        disk: DiskStore | None,
    ) -> None:
        super().__init__(memory)
        self._fingerprint = fingerprint
        self.precision: Precision = precision
        self._disk = disk
        self._generation = 0
        self.slab: EmbeddingSlab | None = None
        self._enough = threading.Event()
        self._writer = CacheWriter(self.put, STAGED_BYTES)
        self._warming: threading.Thread | None = None
        if disk is not None:
            self._warming = threading.Thread(
                target=self._warm, args=(disk,), name="maxsimd-cache", daemon=True
            )
            self._warming.start()

    def key(self, document: str | bytes, how: str) -> bytes:
        """Returns the digest of the fingerprint, a document, and `how` it is read: truncation, limits, the
        owning tenant. The document is a text, or the SHA-256 of one in UTF-8."""
        if isinstance(document, str):
            document = hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()
        digest = hashlib.blake2b(self._fingerprint, digest_size=32)
        digest.update(how.encode())
        digest.update(b"\0")
        digest.update(document)
        return digest.digest()

    def get(self, key: bytes) -> CachedEmbedding | None:
        """Finds an entry in memory, among those to be written, or on disk. Counts no hit or miss, but a
        request: entries that are requested more often stay longer."""
        return self._memory.get(key) or self._beside_memory(key)

    def peek(self, key: bytes) -> CachedEmbedding | None:
        """Like `get`, for a document that was looked up before: this is no further request."""
        return self._memory.peek(key) or self._beside_memory(key)

    def _beside_memory(self, key: bytes) -> CachedEmbedding | None:
        # One that is written meanwhile is in memory before it is no longer staged.
        entry = self._writer.get(key) or self._memory.peek(key)
        if entry is None and self._disk is not None:
            generation = self._generation
            entry = self._disk.get(key)
            if entry is not None:
                with self._lock:
                    if generation == self._generation:
                        self._memory.put(key, entry)
        return entry

    def rounded(self, items: Ragged) -> Ragged:
        """Rounds embeddings to the cache's precision, on their device."""
        values, scales = rounded(items.values.detach(), self.precision)
        return Ragged(values, items.offsets, scales)

    def stage(self, embeddings: PendingEmbeddings) -> None:
        """Makes embeddings findable at once. A thread writes them, as far as it keeps up."""
        self._writer.stage(embeddings)

    def put(self, entries: Iterable[tuple[bytes, CachedEmbedding]]) -> None:
        written = list(entries)
        for key, entry in written:
            self._memory.put(key, entry)
        if self._disk is None:
            self._memory.warn_if_too_small("embeddings", _ADVICE)
        elif written:
            self._disk.put(written)

    def flush(self, seconds: float | None = None) -> bool:
        """Waits at most `seconds` until all staged embeddings are written; returns whether they are."""
        return self._writer.flush(seconds)

    def drop(self, key: bytes) -> None:
        self._writer.drop(key)
        if self._disk is not None:
            self._disk.drop(key)
        self._begin_generation()
        self._memory.drop(key)
        if self.slab is not None:
            self.slab.drop(key)

    def wait_until_warm(self, seconds: float) -> None:
        """Waits at most `seconds` for what is read at start."""
        if self._warming is not None:
            self._warming.join(seconds)

    def clear(self) -> None:
        """Forgets all entries, also those still to be written."""
        self._stop_warming()
        self._writer.clear()
        if self._disk is not None:
            self._disk.clear()
        self._begin_generation()
        self._memory.clear()
        if self.slab is not None:
            self.slab.clear()

    def _begin_generation(self) -> None:
        """Keeps what others have read from disk by now out of memory."""
        with self._lock:
            self._generation += 1

    def close(self, seconds: float | None = None) -> None:
        """Writes what is staged within `seconds`, and closes the disk. The rest is lost."""
        self._stop_warming(seconds)
        self._writer.close(seconds)
        if self._disk is not None:
            self._disk.close()

    def _warm(self, disk: DiskStore) -> None:
        """Reads as many of the newest entries as fit, and puts the newest in last."""
        found: list[tuple[bytes, CachedEmbedding]] = []
        room = self._memory.limit
        for key, entry in disk.newest():
            room -= 0 if entry is None else entry.nbytes
            if room < 0 or self._enough.is_set():
                break
            if entry is not None:
                found.append((key, entry))
        for key, entry in reversed(found):
            if self._enough.is_set():
                return
            if self._memory.get(key) is None:
                self._memory.put(key, entry)

    def _stop_warming(self, seconds: float | None = None) -> None:
        self._enough.set()
        if self._warming is not None:
            self._warming.join(seconds)

    @property
    def num_staged(self) -> int:
        """Embeddings still to be written."""
        return self._writer.num_staged

    @property
    def skipped(self) -> int:
        """Embeddings that were not cached because writing did not keep up."""
        return self._writer.skipped

    @property
    def limit(self) -> int:
        """The most bytes on the host, in memory and on disk."""
        return self._memory.limit + (0 if self._disk is None else self._disk.limit)

    @property
    def entries(self) -> int:
        return len(self._memory) if self._disk is None else max(len(self._memory), len(self._disk))

    @property
    def disk_bytes(self) -> int:
        return 0 if self._disk is None else self._disk.nbytes

    @property
    def evictions(self) -> int:
        return self._memory.evictions + (0 if self._disk is None else self._disk.evictions)


# About what an entry takes, with its key and its places in the store.
_ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The cost of running a document: tokens, truncated inputs, whether the query was truncated, and
    windows. If documents are run together, the first has the numbers of all."""

    tokens: int
    truncated: int
    query_truncated: bool
    windows: int


@dataclass(frozen=True, slots=True)
class CachedScore:
    """A document's score before any activation, and what it cost."""

    score: float
    facts: RunFacts

    @property
    def nbytes(self) -> int:
        return _ENTRY_BYTES


class PairKeys:
    """The keys of one query's pairs. Reads the query once, which may be far longer than the documents."""

    def __init__(self, query: str, how: str) -> None:
        self._digest = hashlib.blake2b(digest_size=32)
        for text in (how, query):
            part = text.encode("utf-8", "surrogatepass")
            self._digest.update(len(part).to_bytes(8, "big") + part)

    def key(self, document: str) -> bytes:
        digest = self._digest.copy()
        digest.update(document.encode("utf-8", "surrogatepass"))
        return digest.digest()


class ScoreCache(_Cache[CachedScore]):
    """Scores of models that read query and document together, in `limit` bytes. Thread-safe."""

    num_staged = skipped = disk_bytes = 0
    slab = None

    def __init__(self, limit: int) -> None:
        super().__init__(MemoryStore(limit))

    def find(self, keys: Sequence[bytes]) -> list[CachedScore | None]:
        """Returns the entry of each key, or None. Counts hits and misses."""
        found = [self._memory.get(key) for key in keys]
        hits = sum(entry is not None for entry in found)
        self.count(hits, len(found) - hits)
        return found

    def put(self, entries: Iterable[tuple[bytes, CachedScore]]) -> None:
        for key, entry in entries:
            self._memory.put(key, entry)
        self._memory.warn_if_too_small("scores", "raise cache_mb")

    def clear(self) -> None:
        self._memory.clear()
