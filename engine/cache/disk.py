"""Embeddings on disk, shared by several processes, the oldest going first."""

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from maxsimd.engine.cache import tables
from maxsimd.engine.cache.database import LARGEST, PAGE, PORTION
from maxsimd.engine.cache.entry import CachedEmbedding
from maxsimd.engine.cache.guarded import GuardedDatabase, Warnings
from maxsimd.engine.cache.tables import Usage

Entries = list[tuple[bytes, CachedEmbedding]]

# How often what other processes write is counted, at most.
SECONDS_BETWEEN_COUNTS = 1.0
# What a database takes beside its entries.
_OVERHEAD = 8 * PAGE
# More than any entry's sequence number.
_END = (1 << 63) - 1


class DiskStore:
    """At most `limit` bytes in a folder, which several processes may share. Thread-safe; raises nothing.

    What cannot be read is as if it were not there, and what cannot be written is left out."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.limit = limit
        self._database = GuardedDatabase(folder)
        self._warnings = Warnings(folder)
        self._usage = Usage(0, 0, 0)
        self._counted_at = 0.0
        self.evictions = 0
        if os.path.exists(os.path.join(folder, "data.mdb")):
            self._warnings.say("holds data.mdb and lock.mdb of an earlier version, which may be removed")
        self._database.read(self._count)

    @property
    def nbytes(self) -> int:
        """How much of the file was in use when it was last looked at."""
        return self._usage.nbytes

    def __len__(self) -> int:
        """How many entries there were when they were last counted."""
        return self._usage.entries

    def get(self, key: bytes) -> CachedEmbedding | None:
        found = self._database.read(partial(self._find, key=key))
        if not found:
            return None
        [entry] = found
        if entry is None:
            self._warnings.say("holds entries that are damaged, which are left out")
            self.drop(key)
        return entry

    def newest(self) -> Iterator[tuple[bytes, CachedEmbedding | None]]:
        """The entries, None for one that is damaged, the newest first. Ends early where the store cannot be
        read."""
        sequence = _END
        # Each by itself, because nobody can write while something is read.
        while found := self._database.read(partial(_find_before, sequence=sequence)):
            sequence, key, entry = found
            yield key, entry

    def put(self, entries: Entries) -> None:
        """Stores entries; the oldest go where there is no room."""
        for portion in self._portions(entries):
            self._database.write(partial(self._write, entries=portion))

    def drop(self, key: bytes) -> None:
        self._database.write(partial(self._drop, key=key))

    def clear(self) -> None:
        """Forgets all entries, and those of a database that was damaged. Where that cannot be done now, none
        is found until it is."""
        self._usage = Usage(0, 0, 0)
        self._database.clear()
        self._database.read(self._count)
        self._database.forget_damaged()

    def close(self) -> None:
        """From now on the store is as if it were empty."""
        self._database.close()

    def _find(self, connection: sqlite3.Connection, key: bytes) -> list[CachedEmbedding | None]:
        """What there is under a key: nothing, an entry, or one that is damaged, as None."""
        if time.monotonic() - self._counted_at >= SECONDS_BETWEEN_COUNTS:
            self._count(connection)
        data = tables.read(connection, key)
        return [] if data is None else [CachedEmbedding.from_bytes(key, data)]

    def _portions(self, entries: Iterable[tuple[bytes, CachedEmbedding]]) -> Iterator[Entries]:
        """Entries in portions that are written at once. What has no room alone is left out."""
        portion: Entries = []
        size, most = 0, min(PORTION, self.limit // 4)
        for key, entry in entries:
            room = _most_bytes(entry.nbytes)
            if room > min(self.limit - _OVERHEAD, LARGEST - PAGE):
                continue
            if portion and size + room > most:
                yield portion
                portion, size = [], 0
            portion.append((key, entry))
            size += room
        if portion:
            yield portion

    def _write(self, connection: sqlite3.Connection, entries: Entries) -> None:
        data = [(key, entry.to_bytes(key)) for key, entry in entries]
        self._make_room(connection, sum(_most_bytes(len(value)) for _, value in data))
        tables.write(connection, data)
        self._count(connection)
        # It is longer than that only where an earlier limit was higher.
        if self._usage.file_bytes > self.limit:
            tables.shrink(connection, self._usage.file_bytes - self.limit)

    def _make_room(self, connection: sqlite3.Connection, nbytes: int) -> None:
        """Drops the oldest entries, where there are not as many bytes left."""
        while (lacking := tables.count(connection).nbytes + nbytes - self.limit) > 0:
            dropped = tables.drop_oldest(connection, lacking)
            if dropped == 0:
                return
            self.evictions += dropped

    def _drop(self, connection: sqlite3.Connection, key: bytes) -> None:
        tables.drop(connection, key)
        self._count(connection)

    def _count(self, connection: sqlite3.Connection) -> None:
        self._counted_at = time.monotonic()
        self._usage = tables.count(connection)


def _find_before(
    connection: sqlite3.Connection, sequence: int
) -> tuple[int, bytes, CachedEmbedding | None] | None:
    """Sequence number, key and entry, None if damaged, of the newest that is older than `sequence`."""
    found = tables.read_before(connection, sequence)
    if found is None:
        return None
    older, key, data = found
    return older, key, CachedEmbedding.from_bytes(key, data)


def _most_bytes(length: int) -> int:
    """How much of a database an entry of that length takes at most."""
    # What is long is cut into pages of its own, and what is left, up to a page, lies beside others. A header
    # and the key, which is stored twice, come on top.
    return length + 256 if length < PAGE // 4 else (length // PAGE + 1) * PAGE
