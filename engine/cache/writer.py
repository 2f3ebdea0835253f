"""Writes new embeddings to the stores in a thread of its own, so that no step waits for a disk."""

import logging
import queue
import threading
from collections.abc import Callable

from maxsimd.engine.cache.arriving import Arriving
from maxsimd.engine.cache.entry import CachedEmbedding

log = logging.getLogger(__name__)

Write = Callable[[list[tuple[bytes, CachedEmbedding]]], None]


class CacheWriter:
    """Holds at most `limit` bytes of staged embeddings: these can be found, and are still to be written by
    `write`. What comes when it is full is not cached. Thread-safe."""

    def __init__(self, write: Write, limit: int) -> None:
        self._write = write
        self._limit = limit
        self._batches: list[Arriving] = []
        self._staged: dict[bytes, tuple[Arriving, int]] = {}
        self._lock = threading.Lock()
        self._writing = threading.RLock()
        self._queue: queue.SimpleQueue[Arriving | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self.skipped = 0
        self._thread = threading.Thread(target=self._run, name="maxsimd-cache-writer", daemon=True)
        self._thread.start()

    def stage(self, embeddings: Arriving) -> None:
        """Makes embeddings findable and has them written soon. Does nothing where it raises."""
        with self._lock:
            if sum(batch.nbytes for batch in self._batches) + embeddings.nbytes > self._limit:
                self.skipped += len(embeddings)
                return
            try:
                self._batches.append(embeddings)
                self._staged |= {key: (embeddings, index) for index, key in enumerate(embeddings.keys)}
                self._idle.clear()
                self._queue.put(embeddings)
            except BaseException:
                self._forget(embeddings)
                raise

    def get(self, key: bytes) -> CachedEmbedding | None:
        """A staged embedding."""
        with self._lock:
            staged = self._staged.get(key)
        return None if staged is None else staged[0].entry(staged[1])

    def drop(self, key: bytes) -> None:
        """Keeps a staged embedding from being written; waits for one that is being written."""
        with self._writing, self._lock:
            self._staged.pop(key, None)

    def clear(self) -> None:
        """Keeps all staged embeddings from being written; waits for those that are being written."""
        with self._writing, self._lock:
            self._staged.clear()

    @property
    def num_staged(self) -> int:
        """How many embeddings are still to be written."""
        return len(self._staged)

    def flush(self, seconds: float | None = None) -> bool:
        """Waits until all is written, for at most that long; says whether it is."""
        return self._idle.wait(seconds)

    def close(self, seconds: float | None = None) -> None:
        """Writes what is staged and ends the thread; waits for that, but for at most that long."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (embeddings := self._queue.get()) is not None:
            with self._writing:
                try:
                    self._write(self._still_wanted(embeddings))
                except Exception:
                    log.exception("embeddings of %d documents are not cached", len(embeddings))
                self._finish(embeddings)

    def _still_wanted(self, embeddings: Arriving) -> list[tuple[bytes, CachedEmbedding]]:
        with self._lock:
            wanted = [
                (key, index)
                for index, key in enumerate(embeddings.keys)
                if self._staged.get(key) == (embeddings, index)
            ]
        return [(key, embeddings.entry(index)) for key, index in wanted]

    def _finish(self, embeddings: Arriving) -> None:
        with self._lock:
            self._forget(embeddings)

    def _forget(self, embeddings: Arriving) -> None:
        self._batches = [batch for batch in self._batches if batch is not embeddings]
        for index, key in enumerate(embeddings.keys):
            if self._staged.get(key) == (embeddings, index):
                del self._staged[key]
        if not self._batches:
            self._idle.set()
