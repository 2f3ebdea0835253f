"""The database of a folder, used so that nothing that happens to the folder gets through: what fails is
logged, and is as if it were not cached.

A database of ours that is damaged is set aside and begun anew; what is not ours is left as it is.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from maxsimd.engine.cache import database as db
from maxsimd.engine.cache import tables
from maxsimd.engine.cache.database import Database

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
            db.forget_damaged(self._folder)

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
                    tables.clear(connection)
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
        seen = db.identify(self._folder)
        try:
            self._database = Database(self._folder)
        except Exception as error:
            if not db.is_damage(error) or not self._set_aside(error, seen):
                raise
            self._database = Database(self._folder)
        self._unusable.forget()
        return self._database

    def _handle(self, error: Exception, access: "_Access", database: Database | None) -> None:
        """Logs a failure, and closes a database that is damaged or whose tables are gone."""
        if db.is_lock(error):
            self._locks.say("was locked for too long, so documents are encoded instead")
        elif database is None:
            self._pause()
            self._unusable.say(f"cannot be used, so embeddings are cached in memory only: {_advice(error)}")
        elif db.is_damage(error):
            self._begin_anew(error, access, database)
        else:
            if tables.is_other_layout(error):
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

    def _set_aside(self, error: Exception, damaged: db.Identity | None) -> bool:
        if not db.set_aside(self._folder, damaged):
            return False
        _log(self._folder, f"was damaged ({_reason(error)}); it is begun anew beside {db.DAMAGED_FILE}")
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
    if isinstance(error, db.NotOursError):
        return f"{error}; move it away, or name another folder (cache_dir)"
    if isinstance(error, OSError):
        return f"{_printable(error.strerror)}; name a folder that can be written to (cache_dir)"
    return _reason(error)


def _reason(error: Exception) -> str:
    return _printable(error) or type(error).__name__


def _printable(what: object) -> str:
    """For the log, of which a damaged file must not make what it likes."""
    return "".join(character if character.isprintable() else "?" for character in str(what))[:300]
