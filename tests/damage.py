"""Damage to the folder of a cache, and processes that heed the permissions of files."""

import ctypes
import os
import random
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from maxsimd.engine.cache.disk import FILE, PAGE

_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH, _PR_CAPBSET_DROP = 1, 2, 24


def heed_permissions() -> None:
    """This process, and what it executes, may write only where permissions say so, even as root."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    # Version 3 of capget(2): effective, permitted and inheritable, for capabilities below 32 and the others.
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        for i in range(3):
            sets[i] &= ~(1 << capability)
    libc.capset(header, sets)


def _overwrite(folder: Path, start: int, data: bytes) -> None:
    with (folder / FILE).open("r+b") as file:
        file.seek(start)
        file.write(data)


def _truncate(part: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / FILE, part((folder / FILE).stat().st_size))


def _random(size: int) -> bytes:
    return random.Random(0).randbytes(size)


def _overwrite_part(parts: int, data: Callable[[int], bytes]) -> Callable[[Path], None]:
    def overwrite(folder: Path) -> None:
        size = (folder / FILE).stat().st_size // parts
        _overwrite(folder, size, data(size))

    return overwrite


def _append(folder: Path) -> None:
    with (folder / FILE).open("ab") as file:
        file.write(_random(3 * PAGE + 7))


def _make_directory(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    (folder / FILE / "of a user").write_text("text")


def _forbid_writing(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)


def _add_older_version(folder: Path) -> None:
    (folder / "data.mdb").write_bytes(b"of an earlier version")
    (folder / "lock.mdb").write_bytes(b"of an earlier version")


def _execute(*statements: str) -> Callable[[Path], None]:
    def execute(folder: Path) -> None:
        with closing(sqlite3.connect(folder / FILE)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    return execute


def _make_foreign(folder: Path) -> None:
    (folder / FILE).unlink()
    _execute("CREATE TABLE entries (name TEXT)", "INSERT INTO entries VALUES ('of a user')")(folder)


def _overwrite_by_foreign(folder: Path) -> None:
    """As `cp` does it: the file stays the same, what it holds is another's."""
    foreign = folder.with_name(folder.name + "-foreign")
    foreign.mkdir()
    (foreign / FILE).touch()
    _make_foreign(foreign)
    (folder / FILE).write_bytes((foreign / FILE).read_bytes())
    shutil.rmtree(foreign)


def _scramble_definitions(folder: Path) -> None:
    _overwrite(folder, (folder / FILE).read_bytes().index(b"TABLE entries"), b"\xff")


def _make_pipe(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated to nothing": _truncate(lambda size: 0),
    "truncated to half": _truncate(lambda size: size // 2),
    "truncated to a page": _truncate(lambda size: PAGE),
    "truncated to a few bytes": _truncate(lambda size: 80),
    "second half zeroed": _overwrite_part(2, bytes),
    "random bytes in the middle": _overwrite_part(3, _random),
    "header overwritten": lambda folder: _overwrite(folder, 0, _random(100)),
    "header asks for a log": lambda folder: _overwrite(folder, 18, b"\2\2"),  # so that SQLite maps a file
    "header of a later format": lambda folder: _overwrite(folder, 44, b"\xff" * 4),
    "table definitions overwritten": _scramble_definitions,
    "garbage appended": _append,
    "file replaced by a directory": _make_directory,
    "file replaced by a pipe": _make_pipe,
    "file deleted": lambda folder: (folder / FILE).unlink(),
    "folder deleted": shutil.rmtree,
    "journal overwritten": lambda folder: (folder / f"{FILE}-journal").write_bytes(_random(2 * PAGE)),
    "read-only": _forbid_writing,
    "earlier version beside it": _add_older_version,
    "file replaced by another program's": _make_foreign,
    "file overwritten by another program's": _overwrite_by_foreign,
    "other tables": _execute("ALTER TABLE entries RENAME COLUMN data TO datum"),
    "number of entries lost": _execute("DELETE FROM counts"),
}


def undo(folder: Path) -> None:
    """Makes room for a new cache, whatever has happened to the folder."""
    if folder.exists():
        folder.chmod(0o755)
        shutil.rmtree(folder)
