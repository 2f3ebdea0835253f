"""The tables of the cache on disk, and what is read from them and written to them.

Each function leaves no lock behind. After an error in one that writes, the connection must be closed.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

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


def read(connection: sqlite3.Connection, key: bytes) -> bytes | None:
    rows = connection.execute("SELECT data FROM entries WHERE key = ?", (key,)).fetchall()
    return _as_bytes(rows[0][0]) if rows else None


def read_before(connection: sqlite3.Connection, sequence: int) -> tuple[int, bytes, bytes] | None:
    """Sequence number, key and data of the newest entry that is older than another."""
    statement = "SELECT sequence, key, data FROM entries WHERE sequence < ? ORDER BY sequence DESC LIMIT 1"
    for older, key, data in connection.execute(statement, (sequence,)).fetchall():
        if older >= sequence:  # or whoever reads on from there might never come to an end
            raise DamagedError("its entries are out of order")
        return older, _as_bytes(key), _as_bytes(data)
    return None


def write(connection: sqlite3.Connection, entries: list[tuple[bytes, bytes]]) -> None:
    """Entries by their keys, as the newest."""
    with _transaction(connection):
        replaced = 0
        for key, data in entries:
            replaced += connection.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount
            connection.execute("INSERT INTO entries (key, data) VALUES (?, ?)", (key, data))
        connection.execute("UPDATE counts SET entries = entries + ?", (len(entries) - replaced,))


def drop(connection: sqlite3.Connection, key: bytes) -> None:
    if not connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchall():
        return
    with _transaction(connection):
        dropped = connection.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount
        connection.execute("UPDATE counts SET entries = entries - ?", (dropped,))


def drop_oldest(connection: sqlite3.Connection, nbytes: int) -> int:
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


def clear(connection: sqlite3.Connection) -> None:
    """Drops all entries, and gives back what the file took for them if that can be done now."""
    with _transaction(connection):
        connection.execute("DELETE FROM entries")
        connection.execute("UPDATE counts SET entries = 0")
    # It copies what is left, which is nothing: far quicker than to give back page by page.
    with suppress(sqlite3.OperationalError):
        connection.execute("VACUUM")


def shrink(connection: sqlite3.Connection, nbytes: int) -> None:
    """Gives back what is not in use of the file, until it is shorter by that many bytes or by a few MiB."""
    pages = min(-(-nbytes // _page_size(connection)), _MOST_GIVEN_BACK)
    # As a script: sqlite3 stops a statement without columns after its first row, which is one page here.
    connection.executescript(f"PRAGMA incremental_vacuum({pages})")


def count(connection: sqlite3.Connection) -> Usage:
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
