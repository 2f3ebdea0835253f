"""Cached embeddings and texts on disk: SQLite databases that several processes may share.

No part of them is mapped into memory: if someone truncates a mapped file, the process dies. For the same
reason there is no write-ahead log, whose index is always mapped.
"""

import logging
import os
import sqlite3
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from maxsimd.engine.cache.embeddings import CachedEmbedding
from maxsimd.pooling.ragged import runs

log = logging.getLogger(__name__)

T = TypeVar("T")


class Entry(Protocol):
    """A value that a database holds under its key."""

    @property
    def nbytes(self) -> int: ...

    def to_bytes(self, key: bytes) -> bytes:
        """Returns self-contained bytes."""

    @classmethod
    def from_bytes(cls, key: bytes, data: bytes) -> Self | None:
        """Returns an entry; None for damaged bytes, and for those of another key."""


E = TypeVar("E", bound=Entry)
# The device and inode of a file: another file may get its path.
Identity = tuple[int, int]

FILE = "maxsimd-embeddings.sqlite3"
# Each new key rewrites a whole page of the index, so pages are small; but large entries take many of them.
PAGE = 16 * 1024
# The most bytes written at once, so that nobody waits for long.
PORTION = 2 * 1024 * 1024
# The longest wait for another process's lock.
LOCK_SECONDS = 0.2
# The largest entry: a damaged length cannot ask for more memory.
LARGEST = 256 * 1024 * 1024
# The pause after a failure: a request with many documents waits for a lock once, not once for each.
PAUSE_SECONDS = 1.0
SECONDS_BETWEEN_WARNINGS = 60.0
# The least interval between counts of what other processes write.
SECONDS_BETWEEN_COUNTS = 1.0

_TABLES = (
    # The larger the sequence number, the newer the entry.
    "CREATE TABLE entries (sequence INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, data BLOB NOT NULL)",
    # In one row, because SQLite would go through all entries to count them.
    "CREATE TABLE counts (entries INTEGER NOT NULL)",
    "INSERT INTO counts VALUES (0)",
)
_ADD_TO_COUNT = "UPDATE counts SET entries = entries + ?"
# The most entries dropped, and the most pages given back, in one transaction.
_MOST_DROPPED = _MOST_GIVEN_BACK = 256
# Bytes beside the entries.
_OVERHEAD = 8 * PAGE
# Above any sequence number.
_END = (1 << 63) - 1
_MAGIC = b"SQLite format 3\0"
# SQLite's header: magic, versions for writing and reading, schema cookie, user version, application id.
_HEADER = struct.Struct(">16s2x2B20xI16xi4xi")
# The format version without a write-ahead log.
_WITHOUT_LOG = 1
_APPLICATION = int.from_bytes(b"mxsd", "big")
_VERSION = 1


class DamagedError(Exception):
    """The database is ours but cannot be used."""


class NotOursError(Exception):
    """Our file name is taken by another program, or by another version of this one."""


class _Uses:
    """The connections in use, of all engines in this process. Thread-safe.

    On POSIX, closing a file drops all the locks that the process has on it, also those of SQLite. Another
    process could then write beside this one."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._changed = threading.Condition()
        self._number = 0
        self._is_paused = False

    @contextmanager
    def one(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self._number += 1
        try:
            yield
        finally:
            with self._changed:
                self._number -= 1
                self._changed.notify_all()

    @contextmanager
    def none(self) -> Iterator[None]:
        """Waits until no connection is in use, and lets none begin."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self._is_paused = True
            self._changed.wait_for(lambda: not self._number)
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()


_uses = _Uses()
# The threads with connections in use are not in a forked process.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_uses.reset)


class Database:
    """An open database. Thread-safe: each use has its own connection.

    Raises NotOursError, DamagedError, sqlite3.Error or OSError if it cannot be opened or created."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = os.path.abspath(path)
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        _examine(self._path)
        try:
            with self.connection() as connection:
                self.identity = identify(self._path)
                _create_tables(connection)
        except sqlite3.OperationalError as error:
            if _is_other_layout(error):
                raise DamagedError(str(error)) from error
            raise

    @property
    def is_current(self) -> bool:
        """Whether the open file still has its path."""
        return self.identity is not None and identify(self._path) == self.identity

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Lends a connection to the calling thread. After an error it is closed, which rolls back."""
        with _uses.one():
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
        """Closes idle connections now, the others after their use."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            with suppress(sqlite3.Error):
                connection.close()


def identify(path: str) -> Identity | None:
    """Returns which file has this path now; None if none does."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_damage(error: Exception) -> bool:
    """Whether an error means damage, not a lock, a full disk, missing permission or the like."""
    # SQLite's messages quote table definitions, which cannot be decoded if they are damaged.
    if isinstance(error, DamagedError | UnicodeDecodeError):
        return True
    # Our own entries are never too big, or there twice.
    codes = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_CONSTRAINT)
    return _has_code(error, *codes)


def _is_other_layout(error: Exception) -> bool:
    """Whether an error says that a table or column is missing, or that SQLite cannot read its format."""
    return _has_code(error, sqlite3.SQLITE_ERROR)


def _has_code(error: Exception, *codes: int) -> bool:
    """Whether an error has one of SQLite's codes, without their extended bits."""
    return getattr(error, "sqlite_errorcode", -1) & 0xFF in codes


def _examine(path: str) -> None:
    """Raises NotOursError or DamagedError for a file that cannot be used, by its header.

    SQLite itself would map a file that claims to have a write-ahead log. Waits for connections in use."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise NotOursError(f"{os.path.basename(path)} in it is not a file")
    with _uses.none(), open(path, "rb") as file:
        header = file.read(_HEADER.size)
    if not header:
        return
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DamagedError("its header is not that of a database")
    _, writing, reading, changes, version, application = _HEADER.unpack(header)
    if (application, changes) == (0, 0):
        return  # it never had a table: somebody began to create it, most likely we
    if application != _APPLICATION:
        raise NotOursError(f"{os.path.basename(path)} in it belongs to another program")
    if version != _VERSION:
        raise NotOursError(f"{os.path.basename(path)} in it was written by another version of maxsimd")
    if (writing, reading) != (_WITHOUT_LOG, _WITHOUT_LOG):
        raise DamagedError("its header asks for a write-ahead log")


def _connect(path: str) -> sqlite3.Connection:
    # Threads may share a connection as long as no two use it at once.
    connection = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.text_factory = bytes  # damage may turn a blob into a text
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
        for setting in (
            "mmap_size = 0",
            # In pages. Holds all that is written at once, so that a lock is needed only at the end.
            f"cache_size = {2 * PORTION // PAGE}",
            "journal_mode = TRUNCATE",
            # Entries need to outlive the process, not the machine.
            "synchronous = OFF",
            # Some builds overwrite deleted data with zeros.
            "secure_delete = OFF",
            # Never run code that a database contains.
            "trusted_schema = OFF",
            "cell_size_check = ON",
        ):
            connection.execute(f"PRAGMA {setting}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _create_tables(connection: sqlite3.Connection) -> None:
    """Creates the tables of a new database. Raises sqlite3.OperationalError if it has other tables."""
    if not _has_tables(connection):
        # This cannot be set later, and the second of them writes at once.
        connection.execute(f"PRAGMA page_size = {PAGE}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        with _transaction(connection):
            # Another process may have been quicker.
            if not _has_tables(connection):
                for statement in _TABLES:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {_VERSION}")
    connection.execute("SELECT sequence, key, data, entries FROM entries, counts LIMIT 0").fetchall()


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall())


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commits all writes within, or none."""
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("COMMIT")


# Topics of warnings. Reads and writes pause apart.
_READ, _WRITTEN_TO, _UNUSABLE = "read", "written to", "unusable"


class GuardedDatabase:
    """Opens a database on demand, and again after it was damaged, removed or replaced. Failures are logged
    and count as misses. Thread-safe; raises nothing.

    A damaged database of ours is renamed and begun anew; foreign files stay untouched. Messages call its
    entries `what`."""

    def __init__(self, path: Path, what: str) -> None:
        self._path = Path(os.path.abspath(path))
        self._what = what
        self._database: Database | None = None
        self._opening = threading.Lock()
        self._closed = False
        self._must_clear = False
        # When each message was logged, by topic and text.
        self._said: dict[tuple[str, str], float] = {}
        # The ends of the pauses after failures.
        self._paused_until = {_READ: 0.0, _WRITTEN_TO: 0.0}

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Returns the result of `work` for a connection; None after a failure and in its pause."""
        return self._attempt(_READ, work)

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Like `read`. Failures to write do not pause reads."""
        return self._attempt(_WRITTEN_TO, work)

    def clear(self) -> None:
        """Drops all entries. If that fails, nothing is read until it has been done; `close` tries again."""
        self._must_clear = True
        self._pause(0.0, _READ, _WRITTEN_TO)
        self._attempt(_WRITTEN_TO, lambda connection: None)

    def close(self) -> None:
        """Ends all use of the database, which then appears empty."""
        if self._must_clear and not self._closed:
            GuardedDatabase.clear(self)
        self._closed = True
        if self._database is not None:
            self._database.close()

    def _attempt(self, access: str, work: Callable[[sqlite3.Connection], T]) -> T | None:
        if self._closed or time.monotonic() < self._paused_until[access]:
            return None
        database = None
        try:
            database = self._open()
            if database is None:
                return None
            with database.connection() as connection:
                if self._must_clear:
                    self._clear(connection)
                result = work(connection)
        except Exception as error:
            self._pause(PAUSE_SECONDS, access)
            self._handle(error, access, database)
            return None
        self._forget(access)
        return result

    def _clear(self, connection: sqlite3.Connection) -> None:
        """Drops all entries, and shrinks the file if possible."""
        with _transaction(connection):
            connection.execute("DELETE FROM entries")
            connection.execute("UPDATE counts SET entries = 0")
        # VACUUM copies what is left, which is nothing; giving pages back is far slower.
        with suppress(sqlite3.OperationalError):
            connection.execute("VACUUM")
        self._must_clear = False

    def _open(self) -> Database | None:
        """Returns the open database, opening it if needed. None while another thread opens it, and if its
        file was replaced: the new file is opened after a pause."""
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
            self._pause(PAUSE_SECONDS, _READ, _WRITTEN_TO)
            self._log("was removed or replaced, and is opened anew")
            return None
        finally:
            self._opening.release()

    def _open_anew(self) -> Database:
        seen = identify(str(self._path))
        try:
            self._database = Database(self._path)
        except Exception as error:
            if not is_damage(error) or not self._set_aside(error, seen):
                raise
            self._database = Database(self._path)
        self._forget(_UNUSABLE)
        return self._database

    def _handle(self, error: Exception, access: str, database: Database | None) -> None:
        """Logs a failure, and closes a database that is damaged or has lost its tables."""
        if _has_code(error, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            self._say("was locked for too long, and does without it for a moment")
        elif database is None:
            self._pause(PAUSE_SECONDS, _READ, _WRITTEN_TO)
            advice = f"cannot be used, so {self._what}s are cached in memory only: {_advice(error)}"
            self._say(advice, _UNUSABLE)
        elif is_damage(error):
            self._begin_anew(error, access, database)
        else:
            if _is_other_layout(error):
                self._let_go(database)
            self._say(f"cannot be {access}: {_reason(error)}", access)

    def _begin_anew(self, error: Exception, access: str, database: Database) -> None:
        """Sets a damaged database aside, unless another thread or process has done so."""
        if not self._opening.acquire(blocking=False):
            return
        try:
            if self._database is database:
                self._let_go(database)
                self._set_aside(error, database.identity)
        except Exception as failure:
            self._say(f"is damaged ({_reason(error)}) and stays unused: {_advice(failure)}", access)
        finally:
            self._opening.release()

    def _set_aside(self, error: Exception, damaged: Identity | None) -> bool:
        """Renames a damaged database. False if another process did. Raises NotOursError or OSError."""
        path = str(self._path)
        if damaged is None or identify(path) != damaged:
            return False
        with suppress(DamagedError):
            _examine(path)  # someone may have written something else over it
        os.replace(path, self._damaged_path)
        self._log(f"was damaged ({_reason(error)}); it is begun anew beside {self._damaged_path.name}")
        return True

    @property
    def _damaged_path(self) -> Path:
        """The name of a database that was damaged, in place of an earlier one."""
        return self._path.with_suffix(".damaged.sqlite3")

    def _pause(self, seconds: float, *accesses: str) -> None:
        self._paused_until |= dict.fromkeys(accesses, time.monotonic() + seconds)

    def _let_go(self, database: Database) -> None:
        database.close()
        if self._database is database:
            self._database = None

    def _say(self, what: str, topic: str = "") -> None:
        """Logs a message about the folder, at most once a minute."""
        now = time.monotonic()
        if now - self._said.get((topic, what), -SECONDS_BETWEEN_WARNINGS) >= SECONDS_BETWEEN_WARNINGS:
            self._said[topic, what] = now
            self._log(what)

    def _forget(self, topic: str) -> None:
        """Makes the next message on a topic appear at once, because the last problem is over."""
        for said in [*self._said]:
            if said[0] == topic:
                self._said.pop(said, None)

    def _log(self, what: str) -> None:
        log.warning("the %s cache in %s %s", self._what, _printable(self._path.parent), what)


def _advice(error: Exception) -> str:
    """Returns what is wrong with a folder, and what to change."""
    if isinstance(error, NotOursError):
        return f"{error}; move it away, or name another folder (cache_dir)"
    if isinstance(error, OSError):
        return f"{_printable(error.strerror)}; name a folder that can be written to (cache_dir)"
    return _reason(error)


def _reason(error: Exception) -> str:
    return _printable(error) or type(error).__name__


def _printable(what: object) -> str:
    """Keeps what a damaged file says from garbling the log."""
    return "".join(character if character.isprintable() else "?" for character in str(what))[:300]


@dataclass(frozen=True, slots=True)
class Usage:
    """The size of a database: entries, bytes of the pages in use, and bytes of the file."""

    entries: int
    nbytes: int
    file_bytes: int


class EntryStore(GuardedDatabase, Generic[E]):
    """Entries of one `kind`, called `what`, in at most `limit` bytes of a file, which processes may share;
    the oldest are evicted first. Thread-safe; raises nothing.

    An entry that cannot be read counts as missing, and one that cannot be written is left out."""

    def __init__(self, path: Path, limit: int, kind: type[E], what: str) -> None:
        super().__init__(path, what)
        self.limit = limit
        self._kind = kind
        self._usage = Usage(0, 0, 0)
        self._counted_at = 0.0
        self.evictions = 0
        self.read(self._count)

    @property
    def nbytes(self) -> int:
        """Bytes of the file in use when it was last counted."""
        return self._usage.nbytes

    def __len__(self) -> int:
        return self._usage.entries

    def get(self, key: bytes) -> E | None:
        found = self.read(partial(self._find, key=key))
        if not found:
            return None
        entry = found[0]
        if entry is None:
            self._say("holds entries that are damaged, which are left out")
            self.drop(key)
        return entry

    def newest(self) -> Iterator[tuple[bytes, E | None]]:
        """Yields entries, the newest first; None for a damaged one. Ends early if reading fails."""
        sequence = _END
        # One by one, because nobody can write during a read.
        while found := self.read(partial(self._read_before, sequence=sequence)):
            sequence, key, entry = found
            yield key, entry

    def put(self, entries: Sequence[tuple[bytes, E]]) -> None:
        """Stores entries, in portions, without those too large for the store; the oldest are evicted."""
        largest = min(self.limit - _OVERHEAD, LARGEST - PAGE)
        fitting = [each for each in entries if _most_bytes(each[1].nbytes) <= largest]
        sizes = (_most_bytes(entry.nbytes) for _, entry in fitting)
        for portion in runs(sizes, min(PORTION, self.limit // 4)):
            self.write(partial(self._write, entries=fitting[portion]))

    def drop(self, key: bytes) -> None:
        self.write(partial(self._drop, key=key))

    def clear(self) -> None:
        """Forgets all entries, damaged databases too. If that fails, nothing is found until it succeeds."""
        self._usage = Usage(0, 0, 0)
        super().clear()
        self.read(self._count)
        with suppress(OSError, ValueError):
            self._damaged_path.unlink(missing_ok=True)

    def _find(self, connection: sqlite3.Connection, key: bytes) -> list[E | None]:
        """Returns [] if there is no entry, [None] if it is damaged."""
        if time.monotonic() - self._counted_at >= SECONDS_BETWEEN_COUNTS:
            self._count(connection)
        rows = connection.execute("SELECT data FROM entries WHERE key = ?", (key,)).fetchall()
        return [self._kind.from_bytes(key, _as_bytes(data)) for (data,) in rows]

    def _write(self, connection: sqlite3.Connection, entries: Sequence[tuple[bytes, E]]) -> None:
        data = [(key, entry.to_bytes(key)) for key, entry in entries]
        self._make_room(connection, sum(_most_bytes(len(value)) for _, value in data))
        with _transaction(connection):
            replaced = 0
            for row in data:
                replaced += connection.execute("DELETE FROM entries WHERE key = ?", row[:1]).rowcount
                connection.execute("INSERT INTO entries (key, data) VALUES (?, ?)", row)
            connection.execute(_ADD_TO_COUNT, (len(data) - replaced,))
        self._count(connection)
        excess = self._usage.file_bytes - self.limit
        if excess > 0:  # only if an earlier limit was higher
            pages = min(-(-excess // _pragma(connection, "page_size")), _MOST_GIVEN_BACK)
            # A script, because sqlite3 stops a statement without columns after its first row: one page here.
            connection.executescript(f"PRAGMA incremental_vacuum({pages})")

    def _make_room(self, connection: sqlite3.Connection, nbytes: int) -> None:
        """Drops the oldest entries until `nbytes` are free."""
        while (lacking := _usage(connection).nbytes + nbytes - self.limit) > 0:
            with _transaction(connection):
                oldest = f"SELECT sequence, length(data) FROM entries ORDER BY sequence LIMIT {_MOST_DROPPED}"
                last = None
                for sequence, length in connection.execute(oldest).fetchall():
                    last = sequence
                    lacking -= length or 0
                    if lacking <= 0:
                        break
                dropped = connection.execute("DELETE FROM entries WHERE sequence <= ?", (last,)).rowcount
                connection.execute(_ADD_TO_COUNT, (-dropped,))
            if dropped == 0:
                return
            self.evictions += dropped

    def _drop(self, connection: sqlite3.Connection, key: bytes) -> None:
        if connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchall():
            with _transaction(connection):
                dropped = connection.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount
                connection.execute(_ADD_TO_COUNT, (-dropped,))
        self._count(connection)

    def _read_before(
        self, connection: sqlite3.Connection, sequence: int
    ) -> tuple[int, bytes, E | None] | None:
        """Returns number, key and entry (None if damaged) of the newest entry older than `sequence`."""
        statement = (
            "SELECT sequence, key, data FROM entries WHERE sequence < ? ORDER BY sequence DESC LIMIT 1"
        )
        for older, key, data in connection.execute(statement, (sequence,)).fetchall():
            if older >= sequence:  # or reading on from there might never end
                raise DamagedError("its entries are out of order")
            return older, _as_bytes(key), self._kind.from_bytes(_as_bytes(key), _as_bytes(data))
        return None

    def _count(self, connection: sqlite3.Connection) -> None:
        self._counted_at = time.monotonic()
        self._usage = _usage(connection)


class DiskStore(EntryStore[CachedEmbedding]):
    """Embeddings in at most `limit` bytes of a folder."""

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(folder / FILE, limit, CachedEmbedding, "embedding")
        if os.path.exists(os.path.join(folder, "data.mdb")):
            self._say("holds data.mdb and lock.mdb of an earlier version, which may be removed")


def _usage(connection: sqlite3.Connection) -> Usage:
    pages, free = _pragma(connection, "page_count"), _pragma(connection, "freelist_count")
    size = _pragma(connection, "page_size")
    match connection.execute("SELECT entries FROM counts").fetchall():
        case [(int(entries),)]:
            return Usage(entries, (pages - free) * size, pages * size)
    raise DamagedError("the number of its entries is missing")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchall()[0][0])


def _as_bytes(value: object) -> bytes:
    """Damage may give a value another type."""
    return value if isinstance(value, bytes) else b""


def _most_bytes(length: int) -> int:
    """Returns the most bytes that an entry of this length takes."""
    # Long entries have whole pages of their own; the header and the key, stored twice, come on top.
    return length + 256 if length < PAGE // 4 else (length // PAGE + 1) * PAGE
