"""Embeddings in memory, the least recently used going first."""

import threading
from collections import OrderedDict

from maxsimd.engine.cache.entry import CachedEmbedding


class MemoryStore:
    """Holds at most `limit` bytes of embeddings. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[bytes, CachedEmbedding] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> CachedEmbedding | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def put(self, key: bytes, entry: CachedEmbedding) -> None:
        """Keeps an entry, unless it alone is more than the store takes."""
        if entry.nbytes > self.limit:
            return
        with self._lock:
            previous = self._entries.pop(key, None)
            self.nbytes += entry.nbytes - (previous.nbytes if previous else 0)
            self._entries[key] = entry
            while self.nbytes > self.limit:
                _, oldest = self._entries.popitem(last=False)
                self.nbytes -= oldest.nbytes
                self.evictions += 1

    def drop(self, key: bytes) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
            self.nbytes -= entry.nbytes if entry else 0

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.nbytes = 0
