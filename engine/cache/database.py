"""The file of the cache on disk: an SQLite database, whose it is, and connections to it.

No part of it is mapped into memory, because a mapped file that someone cuts short ends the process. For that
reason there is no write-ahead log either: its index is always mapped.
"""

import os
import sqlite3
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from maxsimd.engine.cache.tables import DamagedError, create_tables, is_other_layout

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
