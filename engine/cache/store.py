"""The caches as the engine sees them: embeddings of documents, and scores of pairs."""

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.embeddings import (
    CachedEmbedding,
    CacheWriter,
    PendingEmbeddings,
    Precision,
    rounded,
)
from maxsimd.engine.cache.memory import CacheSizeWatch, MemoryStore
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.pooling.ragged import Ragged

# The most bytes of embeddings that wait to be written.
STAGED_BYTES = 256 * 1024 * 1024
_ADVICE = (
    "raise cache_mb, name a folder for more of them (cache_dir), or have them in fewer bytes "
    '(cache_precision="int8")'
)


class EmbeddingCache:
    """Embeddings of documents by the digest of all that they depend on: memory first, then disk. Thread-safe.

    At start a thread reads the newest entries on disk into memory. `fingerprint` is the digest of the
    model and its options. New embeddings are rounded to `precision` before use, so that a hit and a miss
    score identically. On a GPU the `slab`, set once before use, has a second copy of those in use."""

    def __init__(
        self,
        fingerprint: bytes,
        precision: Precision,
        memory: MemoryStore[CachedEmbedding],
        disk: DiskStore | None,
    ) -> None:
        self._fingerprint = fingerprint
        self.precision: Precision = precision
        self._memory = memory
        self._disk = disk
        self._size_watch = None if disk is not None else CacheSizeWatch(memory, "embeddings", _ADVICE)
        self._lock = threading.Lock()
        self.slab: EmbeddingSlab | None = None
        self.hits = 0
        self.misses = 0
        self._enough = threading.Event()
        self._writer = CacheWriter(self.put, STAGED_BYTES)
        self._warming: threading.Thread | None = None
        if disk is not None:
            self._warming = threading.Thread(
                target=self._warm, args=(disk,), name="maxsimd-cache", daemon=True
            )
            self._warming.start()

    def key(self, text: str, how: str) -> bytes:
        """Returns the digest of a document and `how` it is read: role, truncation, limits."""
        digest = hashlib.blake2b(self._fingerprint, digest_size=32)
        digest.update(how.encode())
        digest.update(b"\0")
        digest.update(text.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def get(self, key: bytes) -> CachedEmbedding | None:
        """Returns an entry from memory, from those still to be written, or from disk. Counts no hit or
        miss."""
        return self._memory.get(key) or self._beside_memory(key)

    def peek(self, key: bytes) -> CachedEmbedding | None:
        """Like `get`, for a document that was looked up before: this is no further request."""
        return self._memory.peek(key) or self._beside_memory(key)

    def _beside_memory(self, key: bytes) -> CachedEmbedding | None:
        entry = self._writer.get(key)
        if entry is None and self._disk is not None:
            entry = self._disk.get(key)
            if entry is not None:
                self._memory.put(key, entry)
        return entry

    def count(self, hits: int, misses: int) -> None:
        with self._lock:
            self.hits += hits
            self.misses += misses

    def rounded(self, items: Ragged) -> Ragged:
        """Rounds embeddings to the cache's precision, on their device."""
        values, scales = rounded(items.values.detach(), self.precision)
        return Ragged(values, items.offsets, scales)

    def stage(self, embeddings: PendingEmbeddings) -> None:
        """Makes new embeddings findable at once. A thread writes them to memory and disk, as far as it
        keeps up."""
        self._writer.stage(embeddings)

    def put(self, entries: Iterable[tuple[bytes, CachedEmbedding]]) -> None:
        written = list(entries)
        for key, entry in written:
            self._memory.put(key, entry)
        if written and self._disk is not None:
            self._disk.put(written)
        if self._size_watch is not None:
            self._size_watch.check()

    def flush(self, seconds: float | None = None) -> bool:
        """Waits at most `seconds` until all staged embeddings are written; returns whether they are."""
        return self._writer.flush(seconds)

    def drop(self, key: bytes) -> None:
        self._writer.drop(key)
        self._memory.drop(key)
        if self.slab is not None:
            self.slab.drop(key)
        if self._disk is not None:
            self._disk.drop(key)

    def wait_until_warm(self, seconds: float) -> None:
        """Waits at most `seconds` for what is read at start."""
        if self._warming is not None:
            self._warming.join(seconds)

    def clear(self) -> None:
        """Forgets all entries, also those still to be written."""
        self._stop_warming()
        self._writer.clear()
        self._memory.clear()
        if self.slab is not None:
            self.slab.clear()
        if self._disk is not None:
            self._disk.clear()

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

    def resize(self, limit: int) -> None:
        self._memory.resize(limit)

    @property
    def device_entries(self) -> int:
        return 0 if self.slab is None else len(self.slab)

    @property
    def device_bytes(self) -> int:
        return 0 if self.slab is None else self.slab.nbytes

    @property
    def device_hits(self) -> int:
        """Cached documents scored without a copy to the device."""
        return 0 if self.slab is None else self.slab.hits

    @property
    def device_copies(self) -> int:
        """Cached documents that were copied to the device."""
        return 0 if self.slab is None else self.slab.copied

    @property
    def entries(self) -> int:
        return len(self._memory) if self._disk is None else max(len(self._memory), len(self._disk))

    @property
    def memory_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def disk_bytes(self) -> int:
        return 0 if self._disk is None else self._disk.nbytes

    @property
    def evictions(self) -> int:
        return self._memory.evictions + (0 if self._disk is None else self._disk.evictions)


# About what an entry takes, with its key and its places in the store.
_ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class CachedScore:
    """A document's score before any activation, and what it cost: tokens, truncated inputs, whether the
    query was truncated, and windows."""

    score: float
    tokens: int
    truncated: int
    query_truncated: bool
    windows: int

    @property
    def nbytes(self) -> int:
        return _ENTRY_BYTES


class ScoreCache:
    """Scores of pairs, for models that read query and document together, in `limit` bytes of memory.
    Thread-safe."""

    num_staged = skipped = disk_bytes = 0
    device_entries = device_bytes = device_hits = device_copies = 0

    def __init__(self, limit: int) -> None:
        self._memory: MemoryStore[CachedScore] = MemoryStore(limit)
        self._size_watch = CacheSizeWatch(self._memory, "scores", "raise cache_mb")
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    @staticmethod
    def key(query: str, document: str, how: str) -> bytes:
        """Returns the digest of a pair and `how` it is read: instruction, truncation, limits."""
        digest = hashlib.blake2b(digest_size=32)
        for text in (how, query):
            part = text.encode("utf-8", "surrogatepass")
            digest.update(len(part).to_bytes(8, "big") + part)
        digest.update(document.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def find(self, keys: Sequence[bytes]) -> list[CachedScore | None]:
        """Returns the entry of each key, or None. Counts hits and misses."""
        found = [self._memory.get(key) for key in keys]
        hits = sum(entry is not None for entry in found)
        with self._lock:
            self.hits += hits
            self.misses += len(found) - hits
        return found

    def put(self, entries: Iterable[tuple[bytes, CachedScore]]) -> None:
        for key, entry in entries:
            self._memory.put(key, entry)
        self._size_watch.check()

    def resize(self, limit: int) -> None:
        self._memory.resize(limit)

    def clear(self) -> None:
        self._memory.clear()

    @property
    def entries(self) -> int:
        return len(self._memory)

    @property
    def memory_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def evictions(self) -> int:
        return self._memory.evictions
