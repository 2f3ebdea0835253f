"""Scores of a model that reads query and document together: a pair that was scored is not scored again."""

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from maxsimd.engine.cache.fit import FitWatch
from maxsimd.engine.cache.memory import MemoryStore

# What an entry takes in this process, with its key and its places in the store: about, as Python counts.
_ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class CachedScore:
    """A document's score as the model gives it, before any activation; how many tokens were run and how many
    inputs cut for it; whether its query was cut; and through how many windows it was read."""

    score: float
    tokens: int
    truncated: int
    query_truncated: bool
    windows: int

    @property
    def nbytes(self) -> int:
        return _ENTRY_BYTES


class ScoreCache:
    """Scores by the digest of all that they depend on, in at most `limit` bytes of memory. Thread-safe."""

    num_staged = skipped = disk_bytes = 0
    device_entries = device_bytes = device_hits = device_copies = 0

    def __init__(self, limit: int) -> None:
        self._memory: MemoryStore[CachedScore] = MemoryStore(limit)
        self._fit = FitWatch(self._memory, "scores", "raise cache_mb")
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    @staticmethod
    def key(query: str, document: str, how: str) -> bytes:
        """The digest of a pair and `how` it is read: instruction, truncation, limits."""
        digest = hashlib.blake2b(digest_size=32)
        for text in (how, query):
            part = text.encode("utf-8", "surrogatepass")
            digest.update(len(part).to_bytes(8, "big") + part)
        digest.update(document.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def find(self, keys: Sequence[bytes]) -> list[CachedScore | None]:
        """The entry of each key, None where there is none; counted."""
        found = [self._memory.get(key) for key in keys]
        hits = sum(entry is not None for entry in found)
        with self._lock:
            self.hits += hits
            self.misses += len(found) - hits
        return found

    def put(self, entries: Iterable[tuple[bytes, CachedScore]]) -> None:
        for key, entry in entries:
            self._memory.put(key, entry)
        self._fit.look()

    def resize(self, limit: int) -> None:
        """Takes at most `limit` bytes of memory from now on."""
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
