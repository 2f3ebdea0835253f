"""Embeddings on disk: LMDB, memory-mapped, shared by several processes, the oldest going first.

LMDB's transactions are whole or not there, so a process that is killed while it writes leaves no half entry;
each entry has a checksum of its own besides. A database that cannot be read is set aside and begun anew.
"""

import logging
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb

from maxsimd.engine.cache.entry import CachedEmbedding

log = logging.getLogger(__name__)

_SEQUENCE = struct.Struct(">Q")
_ROOM = 64 * 1024 * 1024


class DiskStore:
    """At most `limit` bytes in a folder, which several processes may share. Thread-safe."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self.evictions = 0
        try:
            self._open()
        except (lmdb.Error, OSError) as error:
            aside = folder.with_name(f"{folder.name}.damaged-{time.time_ns()}")
            log.warning("the cache in %s cannot be read (%s); it is set aside as %s", folder, error, aside)
            shutil.move(folder, aside)
            self._open()

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Room beside the entries, because LMDB writes pages anew before it lets the old ones go. And without
        # syncing: what the system has taken outlives the process, which is all that is promised.
        self._env = lmdb.open(
            str(self._folder),
            map_size=2 * self._limit + _ROOM,
            max_dbs=2,
            sync=False,
            metasync=False,
            max_readers=512,
        )
        self._entries = self._env.open_db(b"entries")
        self._order = self._env.open_db(b"order")

    @property
    def nbytes(self) -> int:
        """What the entries and their order take, in whole pages."""
        with self._env.begin() as transaction:
            return self._used(transaction)

    def __len__(self) -> int:
        with self._env.begin() as transaction:
            return int(transaction.stat(self._entries)["entries"])

    def get(self, key: bytes) -> CachedEmbedding | None:
        try:
            with self._env.begin(buffers=True) as transaction:
                data = transaction.get(key, db=self._entries)
                if data is None:
                    return None
                entry = CachedEmbedding.from_bytes(memoryview(data)[_SEQUENCE.size :])
            if entry is None:
                log.warning("an entry of the cache is damaged and is left out")
                self.drop(key)
        except lmdb.Error as error:
            log.warning("the cache cannot be read: %s", error)
            return None
        return entry

    def newest(self) -> Iterator[tuple[bytes, CachedEmbedding]]:
        """The entries that are whole, the newest first. Ends early where the store cannot be read."""
        try:
            with self._env.begin(buffers=True) as transaction:
                cursor = transaction.cursor(self._order)
                more = cursor.last()
                while more:
                    key = bytes(cursor.value())
                    data = transaction.get(key, db=self._entries)
                    entry = None
                    if data is not None:
                        entry = CachedEmbedding.from_bytes(memoryview(data)[_SEQUENCE.size :])
                    if entry is not None:
                        yield key, entry
                    more = cursor.prev()
        except lmdb.Error as error:
            log.warning("the cache cannot be read: %s", error)

    def put(self, entries: list[tuple[bytes, CachedEmbedding]]) -> None:
        """Keeps entries, all or none; the oldest go where there is no room."""
        data = [(key, entry.to_bytes()) for key, entry in entries]
        try:
            with self._env.begin(write=True) as transaction:
                self._write(transaction, data)
                while self._used(transaction) > self._limit:
                    self._evict(transaction)
        except lmdb.Error as error:
            log.warning("the cache cannot be written to: %s", error)

    def clear(self) -> None:
        with self._env.begin(write=True) as transaction:
            transaction.drop(self._entries, delete=False)
            transaction.drop(self._order, delete=False)

    def close(self) -> None:
        self._env.close()

    def _used(self, transaction: lmdb.Transaction) -> int:
        pages = 0
        for database in (self._entries, self._order):
            stat = transaction.stat(database)
            pages += stat["leaf_pages"] + stat["branch_pages"] + stat["overflow_pages"]
        return int(pages * self._env.stat()["psize"])

    def _write(self, transaction: lmdb.Transaction, data: list[tuple[bytes, bytes]]) -> None:
        cursor = transaction.cursor(self._order)
        last = _SEQUENCE.unpack(cursor.key())[0] if cursor.last() else 0
        for number, (key, value) in enumerate(data, last + 1):
            sequence = _SEQUENCE.pack(number)
            previous = transaction.get(key, db=self._entries)
            if previous is not None:
                transaction.delete(previous[: _SEQUENCE.size], db=self._order)
            transaction.put(key, sequence + value, db=self._entries)
            transaction.put(sequence, key, db=self._order)

    def _evict(self, transaction: lmdb.Transaction) -> None:
        """Lets a tenth of the entries go, the oldest."""
        count = int(transaction.stat(self._order)["entries"])
        cursor = transaction.cursor(self._order)
        for _ in range(max(1, count // 10)):
            if not cursor.first():
                return
            transaction.delete(cursor.value(), db=self._entries)
            cursor.delete()
            self.evictions += 1

    def drop(self, key: bytes) -> None:
        with self._env.begin(write=True) as transaction:
            data = transaction.get(key, db=self._entries)
            if data is not None:
                transaction.delete(data[: _SEQUENCE.size], db=self._order)
                transaction.delete(key, db=self._entries)
