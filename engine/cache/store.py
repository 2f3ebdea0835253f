"""The cache as the engine sees it: keys by content, memory before disk, and counts."""

import hashlib
import threading
from collections.abc import Iterable

from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.entry import CachedEmbedding, Precision, rounded
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.pooling.ragged import Ragged


class EmbeddingCache:
    """Embeddings of documents by the digest of all that they depend on. Thread-safe.

    What was kept on disk last is read into memory beside whatever else a start does.

    `fingerprint` stands for the model and its options; `precision` is what embeddings are kept in, and, so
    that a document scores alike whether it was there or not, what new ones are rounded to before use."""

    def __init__(
        self, fingerprint: bytes, precision: Precision, memory: MemoryStore, disk: DiskStore | None
    ) -> None:
        self._fingerprint = fingerprint
        self.precision: Precision = precision
        self._memory = memory
        self._disk = disk
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0
        self._enough = threading.Event()
        self._warming: threading.Thread | None = None
        if disk is not None:
            self._warming = threading.Thread(
                target=self._warm, args=(disk,), name="maxsimd-cache", daemon=True
            )
            self._warming.start()

    def key(self, text: str, how: str) -> bytes:
        """The digest of a document and `how` it is read: role, truncation, limits."""
        digest = hashlib.blake2b(self._fingerprint, digest_size=32)
        digest.update(how.encode())
        digest.update(b"\0")
        digest.update(text.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def get(self, key: bytes) -> CachedEmbedding | None:
        """An entry from memory or disk; counted as neither hit nor miss."""
        entry = self._memory.get(key)
        if entry is None and self._disk is not None:
            entry = self._disk.get(key)
            if entry is not None:
                self._memory.put(key, entry)
        return entry

    def count(self, hits: int, misses: int) -> None:
        """Counts documents that were there and that were not."""
        with self._lock:
            self.hits += hits
            self.misses += misses

    def rounded(self, items: Ragged) -> Ragged:
        """Embeddings as they would be kept, on the device that they are on."""
        values, scales = rounded(items.values.detach(), self.precision)
        return Ragged(values, items.offsets, scales)

    def put(self, entries: Iterable[tuple[bytes, CachedEmbedding]]) -> None:
        """Keeps entries in memory and on disk."""
        kept = list(entries)
        for key, entry in kept:
            self._memory.put(key, entry)
        if kept and self._disk is not None:
            self._disk.put(kept)

    def drop(self, key: bytes) -> None:
        """Forgets an entry."""
        self._memory.drop(key)
        if self._disk is not None:
            self._disk.drop(key)

    def wait_until_warm(self, seconds: float) -> None:
        """Waits for what is read at a start, but not for longer than that."""
        if self._warming is not None:
            self._warming.join(seconds)

    def clear(self) -> None:
        self._stop_warming()
        self._memory.clear()
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        self._stop_warming()
        if self._disk is not None:
            self._disk.close()

    def _warm(self, disk: DiskStore) -> None:
        """Reads the newest entries, as many as memory takes, and puts the newest of them in last."""
        found: list[tuple[bytes, CachedEmbedding]] = []
        room = self._memory.limit
        for key, entry in disk.newest():
            room -= entry.nbytes
            if room < 0 or self._enough.is_set():
                break
            found.append((key, entry))
        for key, entry in reversed(found):
            if self._enough.is_set():
                return
            if self._memory.get(key) is None:
                self._memory.put(key, entry)

    def _stop_warming(self) -> None:
        self._enough.set()
        if self._warming is not None:
            self._warming.join()

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
