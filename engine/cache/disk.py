"""Embeddings on disk, shared by several processes, the oldest going first."""

import logging
import os
import sqlite3
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from maxsimd.engine.cache.embeddings import CachedEmbedding, Entries

_TABLES = (
    # The larger the sequence number, the newer the entry.
    "CREATE TABLE entries (sequence INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, data BLOB NOT NULL)",
    # In one row, because SQLite would go through all entries to count them.
    "CREATE TABLE counts (entries INTEGER NOT NULL)",
    "INSERT INTO counts VALUES (0)",
)
# More entries are not dropped at once, and more pages not given back, so that others get their turn.
_MOST_DROPPED = 256
_MOST_GIVEN_BACK = 256


class DamagedError(Exception):
    """A database is ours and cannot be used."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How many entries a database has, how many bytes its pages in use take, and how many its file takes."""

    entries: int
    nbytes: int
    file_bytes: int


def create_tables(connection: sqlite3.Connection, page: int, application: int, version: int) -> None:
    """Creates the tables of a new database, with pages of `page` bytes, and marks it as that of an
    application, and of a version of it. Raises sqlite3.OperationalError where there are other tables."""
    if not _has_tables(connection):
        # This cannot be set later, and the second of them writes at once.
        connection.execute(f"PRAGMA page_size = {page}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        with _transaction(connection):
            # Another process may have been quicker.
            if not _has_tables(connection):
                for statement in _TABLES:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {application}")
                connection.execute(f"PRAGMA user_version = {version}")
    connection.execute("SELECT sequence, key, data, entries FROM entries, counts LIMIT 0").fetchall()


def is_other_layout(error: Exception) -> bool:
    """Whether an error says that a table or a column is not there, or of a format that SQLite cannot read."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def read_entry(connection: sqlite3.Connection, key: bytes) -> bytes | None:
    rows = connection.execute("SELECT data FROM entries WHERE key = ?", (key,)).fetchall()
    return _as_bytes(rows[0][0]) if rows else None


def read_entry_before(connection: sqlite3.Connection, sequence: int) -> tuple[int, bytes, bytes] | None:
    """Sequence number, key and data of the newest entry that is older than another."""
    statement = "SELECT sequence, key, data FROM entries WHERE sequence < ? ORDER BY sequence DESC LIMIT 1"
    for older, key, data in connection.execute(statement, (sequence,)).fetchall():
        if older >= sequence:  # or whoever reads on from there might never come to an end
            raise DamagedError("its entries are out of order")
        return older, _as_bytes(key), _as_bytes(data)
    return None


def write_entries(connection: sqlite3.Connection, entries: list[tuple[bytes, bytes]]) -> None:
    """Entries by their keys, as the newest."""
    with _transaction(connection):
        replaced = 0
        for key, data in entries:
            replaced += connection.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount
            connection.execute("INSERT INTO entries (key, data) VALUES (?, ?)", (key, data))
        connection.execute("UPDATE counts SET entries = entries + ?", (len(entries) - replaced,))


def drop_entry(connection: sqlite3.Connection, key: bytes) -> None:
    if not connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchall():
        return
    with _transaction(connection):
        dropped = connection.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount
        connection.execute("UPDATE counts SET entries = entries - ?", (dropped,))


def drop_oldest_entries(connection: sqlite3.Connection, nbytes: int) -> int:
    """Drops the oldest entries, until that many bytes are free or a few hundred entries are gone. Returns how
    many."""
    with _transaction(connection):
        oldest = f"SELECT sequence, length(data) FROM entries ORDER BY sequence LIMIT {_MOST_DROPPED}"
        last = None
        for sequence, length in connection.execute(oldest).fetchall():
            last = sequence
            nbytes -= length or 0
            if nbytes <= 0:
                break
        dropped = connection.execute("DELETE FROM entries WHERE sequence <= ?", (last,)).rowcount
        connection.execute("UPDATE counts SET entries = entries - ?", (dropped,))
    return dropped


def clear_entries(connection: sqlite3.Connection) -> None:
    """Drops all entries, and gives back what the file took for them if that can be done now."""
    with _transaction(connection):
        connection.execute("DELETE FROM entries")
        connection.execute("UPDATE counts SET entries = 0")
    # It copies what is left, which is nothing: far quicker than to give back page by page.
    with suppress(sqlite3.OperationalError):
        connection.execute("VACUUM")


def shrink_file(connection: sqlite3.Connection, nbytes: int) -> None:
    """Gives back what is not in use of the file, until it is shorter by that many bytes or by a few MiB."""
    pages = min(-(-nbytes // _page_size(connection)), _MOST_GIVEN_BACK)
    # As a script: sqlite3 stops a statement without columns after its first row, which is one page here.
    connection.executescript(f"PRAGMA incremental_vacuum({pages})")


def count_usage(connection: sqlite3.Connection) -> Usage:
    pages, free = _pragma(connection, "page_count"), _pragma(connection, "freelist_count")
    size = _page_size(connection)
    match connection.execute("SELECT entries FROM counts").fetchall():
        case [(int(entries),)]:
            return Usage(entries, (pages - free) * size, pages * size)
    raise DamagedError("the number of its entries is missing")


def _page_size(connection: sqlite3.Connection) -> int:
    return _pragma(connection, "page_size")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchall()[0][0])


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall())


def _as_bytes(value: object) -> bytes:
    """A value that damage may have given another type: then it is no entry's any more."""
    return value if isinstance(value, bytes) else b""


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is written within, or none of it."""
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("COMMIT")


FILE = "maxsimd-embeddings.sqlite3"
# Where a damaged database goes. There is one at most: the next takes its place.
DAMAGED_FILE = "maxsimd-embeddings.damaged.sqlite3"

# A new entry's key changes a page somewhere, which is then written whole: with large pages that is far more
# than a small entry itself. With small ones a large entry is in many pieces.
PAGE = 16 * 1024
# More bytes than these are not written at once, so that nobody needs to wait for long.
PORTION = 2 * 1024 * 1024
# How many seconds are spent on waiting for another process's lock.
LOCK_SECONDS = 0.2
# No entry is larger. A damaged length can therefore not ask for more memory.
LARGEST = 256 * 1024 * 1024

_MAGIC = b"SQLite format 3\0"
# In SQLite's header: the magic, the version of the format for writing and for reading, a number that counts
# changes of tables, the user version and the application's id.
_HEADER = struct.Struct(">16s2x2B20xI16xi4xi")
# The version of the format of a database that has no write-ahead log.
_WITHOUT_LOG = 1
_APPLICATION = int.from_bytes(b"mxsd", "big")
_VERSION = 1

# The device and the number of a file, which tell it from another that comes to have its path.
Identity = tuple[int, int]


class NotOursError(Exception):
    """What lies under our name was made by another program, or by another version of this one."""


class Database:
    """An open database. Thread-safe: each use has a connection of its own.

    Raises NotOursError, DamagedError, sqlite3.Error or OSError where there is none and none can be made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = _path(folder)
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        _examine(self._path)
        try:
            with self.connection() as connection:
                self.identity = identify(folder)
                create_tables(connection, PAGE, _APPLICATION, _VERSION)
        except sqlite3.OperationalError as error:
            if is_other_layout(error):
                raise DamagedError(str(error)) from error
            raise

    @property
    def is_current(self) -> bool:
        """Whether the open file is still the one that its path leads to."""
        return self.identity is not None and _identify(self._path) == self.identity

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """A connection for the calling thread. After an error it is closed, which undoes what was begun."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _connect(self._path)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Closes what nobody uses now; the rest is closed after its use."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            with suppress(sqlite3.Error):
                connection.close()


def identify(folder: Path) -> Identity | None:
    """Which file is the folder's database now; None where there is none."""
    return _identify(_path(folder))


def set_aside(folder: Path, damaged: Identity | None) -> bool:
    """Gives a damaged database its other name. Says whether it did: not where another process was quicker, so
    that another file has its name now. Raises NotOursError or OSError."""
    path = _path(folder)
    if damaged is None or _identify(path) != damaged:
        return False
    with suppress(DamagedError):
        _examine(path)  # someone may have written something else over it
    os.replace(path, Path(path).with_name(DAMAGED_FILE))
    return True


def forget_damaged(folder: Path) -> None:
    """Removes what was set aside. Raises OSError."""
    (folder / DAMAGED_FILE).unlink(missing_ok=True)


def is_damage(error: Exception) -> bool:
    """Whether an error says that the file is damaged: not that it is locked, that a disk is full, that memory
    or a permission is lacking, or whatever else may be over soon."""
    # SQLite's messages quote the definitions of tables, which sqlite3 cannot decode where they are damaged.
    if isinstance(error, DamagedError | UnicodeDecodeError):
        return True
    # No entry of ours is too big, or there twice.
    codes = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_CONSTRAINT)
    return _code(error) in codes


def is_lock(error: Exception) -> bool:
    """Whether an error says that another process has the database locked."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: Exception) -> int | None:
    """SQLite's code for an error, without the details that it may have in its higher bits."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def _path(folder: Path) -> str:
    return os.path.join(os.path.abspath(folder), FILE)


def _identify(path: str) -> Identity | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _examine(path: str) -> None:
    """Raises NotOursError or DamagedError where a file cannot be used, by its header.

    This must not be left to SQLite, which would map a file for a database that says that it has a write-ahead
    log. And it must be done while no connection is in use: on POSIX systems, a process that closes a file
    loses all the locks that it has on it."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise NotOursError(f"{FILE} in it is not a file")
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    if not header:
        return
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DamagedError("its header is not that of a database")
    _, writing, reading, changes, version, application = _HEADER.unpack(header)
    if (application, changes) == (0, 0):
        return  # it never had a table: somebody began to create it, most likely we
    if application != _APPLICATION:
        raise NotOursError(f"{FILE} in it belongs to another program")
    if version != _VERSION:
        raise NotOursError(f"{FILE} in it was written by another version of maxsimd")
    if (writing, reading) != (_WITHOUT_LOG, _WITHOUT_LOG):
        raise DamagedError("its header asks for a write-ahead log")


def _connect(path: str) -> sqlite3.Connection:
    # A thread may use what another has opened, as long as no two use it at once.
    connection = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.text_factory = bytes  # damage may turn a blob into a text
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
        for setting in (
            "mmap_size = 0",
            # In pages. As much as is written at once, so that a lock is needed only at the end.
            f"cache_size = {2 * PORTION // PAGE}",
            "journal_mode = TRUNCATE",
            # What the system has taken outlives the process, which is all that is promised.
            "synchronous = OFF",
            # Some builds write zeros over whatever is deleted.
            "secure_delete = OFF",
            # A database is data: nothing in it is run.
            "trusted_schema = OFF",
            "cell_size_check = ON",
        ):
            connection.execute(f"PRAGMA {setting}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


log = logging.getLogger(__name__)

T = TypeVar("T")

# After a failure the folder is left alone for this many seconds, so that a request with many documents waits
# for a lock once, and not once for each of them.
PAUSE_SECONDS = 1.0
# How often the same is logged while it lasts.
SECONDS_BETWEEN_WARNINGS = 60.0


class GuardedDatabase:
    """Opens a folder's database as it is needed, and anew when it has been damaged, removed or replaced.
    Thread-safe; raises nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._database: Database | None = None
        self._opening = threading.Lock()
        self._closed = False
        self._must_clear = False
        self._reading = _Access("read", Warnings(folder))
        self._writing = _Access("written to", Warnings(folder))
        self._locks, self._unusable = Warnings(folder), Warnings(folder)

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What `work` returns for a connection. None after a failure, and in the pause that follows."""
        return self._attempt(self._reading, work)

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """The same for what writes. That a folder cannot be written to is no reason not to read it."""
        return self._attempt(self._writing, work)

    def clear(self) -> None:
        """Drops all entries. Where that fails, nothing is read until it has been done."""
        self._must_clear = True
        self._reading.resume()
        self._writing.resume()
        self._attempt(self._writing, lambda connection: None)

    def forget_damaged(self) -> None:
        """Removes what is left of a database that was damaged, where that can be done."""
        with suppress(OSError, ValueError):
            forget_damaged(self._folder)

    def close(self) -> None:
        """From now on the database is as if it could not be used."""
        self._closed = True
        if self._database is not None:
            self._database.close()

    def _attempt(self, access: "_Access", work: Callable[[sqlite3.Connection], T]) -> T | None:
        if self._closed or access.is_paused:
            return None
        database = None
        try:
            database = self._open()
            if database is None:
                return None
            with database.connection() as connection:
                if self._must_clear:
                    clear_entries(connection)
                    self._must_clear = False
                result = work(connection)
        except Exception as error:
            access.pause()
            self._handle(error, access, database)
            return None
        access.warnings.forget()
        return result

    def _open(self) -> Database | None:
        """The open database, opened now if none is. None while another thread opens it, and where its file is
        found to be another: that one is opened after a pause."""
        database = self._database
        if database is not None and database.is_current:
            return database
        if not self._opening.acquire(blocking=False):
            return None
        try:
            database = self._database
            if database is None:
                return self._open_anew()
            if database.is_current:
                return database  # another thread was quicker
            self._let_go(database)
            self._pause()
            _log(self._folder, "was removed or replaced, and is opened anew")
            return None
        finally:
            self._opening.release()

    def _open_anew(self) -> Database:
        seen = identify(self._folder)
        try:
            self._database = Database(self._folder)
        except Exception as error:
            if not is_damage(error) or not self._set_aside(error, seen):
                raise
            self._database = Database(self._folder)
        self._unusable.forget()
        return self._database

    def _handle(self, error: Exception, access: "_Access", database: Database | None) -> None:
        """Logs a failure, and closes a database that is damaged or whose tables are gone."""
        if is_lock(error):
            self._locks.say("was locked for too long, so documents are encoded instead")
        elif database is None:
            self._pause()
            self._unusable.say(f"cannot be used, so embeddings are cached in memory only: {_advice(error)}")
        elif is_damage(error):
            self._begin_anew(error, access, database)
        else:
            if is_other_layout(error):
                self._let_go(database)
            access.warnings.say(f"cannot be {access.name}: {_reason(error)}")

    def _begin_anew(self, error: Exception, access: "_Access", database: Database) -> None:
        """Sets a damaged database aside, unless another thread or process has done so."""
        if not self._opening.acquire(blocking=False):
            return
        try:
            if self._database is database:
                self._let_go(database)
                self._set_aside(error, database.identity)
        except Exception as failure:
            access.warnings.say(f"is damaged ({_reason(error)}) and stays unused: {_advice(failure)}")
        finally:
            self._opening.release()

    def _set_aside(self, error: Exception, damaged: Identity | None) -> bool:
        if not set_aside(self._folder, damaged):
            return False
        _log(self._folder, f"was damaged ({_reason(error)}); it is begun anew beside {DAMAGED_FILE}")
        return True

    def _pause(self) -> None:
        self._reading.pause()
        self._writing.pause()

    def _let_go(self, database: Database) -> None:
        database.close()
        if self._database is database:
            self._database = None


class _Access:
    """Reading or writing: whether it pauses after a failure, and what is logged of its failures."""

    def __init__(self, name: str, warnings: "Warnings") -> None:
        self.name = name
        self.warnings = warnings
        self._until = 0.0

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._until

    def pause(self) -> None:
        self._until = time.monotonic() + PAUSE_SECONDS

    def resume(self) -> None:
        self._until = 0.0


class Warnings:
    """Logs what happens to a folder, the same at most once a minute as long as it lasts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said: dict[str, float] = {}

    def say(self, what: str) -> None:
        now = time.monotonic()
        if now - self._said.get(what, -SECONDS_BETWEEN_WARNINGS) >= SECONDS_BETWEEN_WARNINGS:
            self._said[what] = now
            _log(self._folder, what)

    def forget(self) -> None:
        """What is said next is logged, because the last is over."""
        if self._said:
            self._said.clear()


def _log(folder: Path, what: str) -> None:
    log.warning("the embedding cache in %s %s", _printable(folder), what)


def _advice(error: Exception) -> str:
    """What is wrong with a folder, and what to change."""
    if isinstance(error, NotOursError):
        return f"{error}; move it away, or name another folder (cache_dir)"
    if isinstance(error, OSError):
        return f"{_printable(error.strerror)}; name a folder that can be written to (cache_dir)"
    return _reason(error)


def _reason(error: Exception) -> str:
    return _printable(error) or type(error).__name__


def _printable(what: object) -> str:
    """For the log, of which a damaged file must not make what it likes."""
    return "".join(character if character.isprintable() else "?" for character in str(what))[:300]


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
        data = read_entry(connection, key)
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
        write_entries(connection, data)
        self._count(connection)
        # It is longer than that only where an earlier limit was higher.
        if self._usage.file_bytes > self.limit:
            shrink_file(connection, self._usage.file_bytes - self.limit)

    def _make_room(self, connection: sqlite3.Connection, nbytes: int) -> None:
        """Drops the oldest entries, where there are not as many bytes left."""
        while (lacking := count_usage(connection).nbytes + nbytes - self.limit) > 0:
            dropped = drop_oldest_entries(connection, lacking)
            if dropped == 0:
                return
            self.evictions += dropped

    def _drop(self, connection: sqlite3.Connection, key: bytes) -> None:
        drop_entry(connection, key)
        self._count(connection)

    def _count(self, connection: sqlite3.Connection) -> None:
        self._counted_at = time.monotonic()
        self._usage = count_usage(connection)


def _find_before(
    connection: sqlite3.Connection, sequence: int
) -> tuple[int, bytes, CachedEmbedding | None] | None:
    """Sequence number, key and entry, None if damaged, of the newest that is older than `sequence`."""
    found = read_entry_before(connection, sequence)
    if found is None:
        return None
    older, key, data = found
    return older, key, CachedEmbedding.from_bytes(key, data)


def _most_bytes(length: int) -> int:
    """How much of a database an entry of that length takes at most."""
    # What is long is cut into pages of its own, and what is left, up to a page, lies beside others. A header
    # and the key, which is stored twice, come on top.
    return length + 256 if length < PAGE // 4 else (length // PAGE + 1) * PAGE
