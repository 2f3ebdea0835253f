"""The cache on disk: its order and limits, its file, other processes that use it, and what is not ours."""

import logging
import os
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from maxsimd.engine.cache import disk as disk_module
from maxsimd.engine.cache.disk import FILE, PAGE, DiskStore
from maxsimd.engine.cache.embeddings import CachedEmbedding
from tests.unit.engine.cache.entries import DAMAGED_FILE, MIB, entry, key, same


def numbers(store: DiskStore) -> list[int]:
    return [int.from_bytes(name, "big") for name, found in store.newest() if found is not None]


@contextmanager
def sql(folder: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(folder / FILE, isolation_level=None, timeout=5)) as connection:
        yield connection


# Stored entries


def test_the_newest_come_first_over_a_restart(folder: Path) -> None:
    for start in (0, 3):
        store = DiskStore(folder, 4 * MIB)
        store.put([(key(start), entry(start)), (key(start + 1), entry(start + 1))])
        store.put([(key(start + 2), entry(start + 2))])
        store.close()
    store = DiskStore(folder, 4 * MIB)
    assert (len(store), numbers(store)) == (6, [5, 4, 3, 2, 1, 0])
    assert all(same(found, entry(int.from_bytes(name, "big"))) for name, found in store.newest())
    store.close()


def test_what_is_put_again_is_new_and_one_entry_is_dropped(disk: DiskStore) -> None:
    for number in (0, 1, 2, 0):
        disk.put([(key(number), entry(number + 10 * (number == 0 and len(disk) == 3)))])
    assert (numbers(disk), len(disk)) == ([0, 2, 1], 3)
    assert same(disk.get(key(0)), entry(10))
    disk.put([(key(3), entry(0)), (key(3), entry(1))])
    assert len(disk) == 4, "what is there twice in one put is stored once"
    assert same(disk.get(key(3)), entry(1))
    disk.drop(key(2))
    disk.drop(key(7))
    assert disk.get(key(2)) is None
    assert (numbers(disk), len(disk)) == ([3, 0, 1], 3)


def test_a_cleared_store_gives_its_room_back_and_goes_on(disk: DiskStore, folder: Path) -> None:
    empty = disk.nbytes
    for number in range(3):
        disk.put([(key(number), entry(number, rows=MIB // 16))])
    assert (folder / FILE).stat().st_size > 3 * MIB
    disk.clear()
    assert (len(disk), disk.nbytes, numbers(disk)) == (0, empty, [])
    assert (folder / FILE).stat().st_size == empty
    disk.put([(key(5), entry(5))])
    assert same(disk.get(key(5)), entry(5))


def test_counts_are_those_of_the_file_and_ask_nothing_of_it(disk: DiskStore, folder: Path) -> None:
    """They are asked for on the event loop, which must not wait for a disk or a lock."""
    for number in range(40):
        disk.put([(key(number), entry(number, rows=1000))])
    for number in range(10):
        disk.drop(key(number))
    with sql(folder) as connection:
        pages, free = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
        )
        assert free > 0
        connection.execute("BEGIN EXCLUSIVE")
        assert (len(disk), disk.nbytes, disk.evictions) == (30, (pages - free) * PAGE, 0)


# Limits


@pytest.mark.parametrize("rows", [900, 1100, 30_000])
def test_a_store_and_its_file_fill_the_limit_exactly(disk: DiskStore, folder: Path, rows: int) -> None:
    number = 0
    while disk.evictions < 12:
        batch = max(1, 3000 // rows)
        disk.put([(key(number + i), entry(i, rows)) for i in range(batch)])
        number += batch
        assert disk.nbytes <= 4 * MIB
        assert (folder / FILE).stat().st_size <= 4 * MIB
    assert disk.nbytes > 3 * MIB
    assert len(disk) + disk.evictions == number
    assert numbers(disk) == list(range(number - 1, number - 1 - len(disk), -1))


def test_what_has_no_room_is_left_out_or_evicted(disk: DiskStore, folder: Path) -> None:
    disk.put([(key(1), entry(1)), (key(2), entry(2, rows=4 * MIB // 16)), (key(3), entry(3))])
    assert numbers(disk) == [3, 1]
    assert disk.evictions == 0, "what has no room alone evicts nothing"
    disk.put([(key(number), entry(number, rows=MIB // 4 // 16)) for number in range(40)])
    found = numbers(disk)
    assert found == list(range(39, 39 - len(found), -1))
    assert 8 <= len(found) <= 16
    assert disk.nbytes <= 4 * MIB
    for number in range(30):
        disk.put([(key(number), entry(number, rows=6000))])
    lower = DiskStore(folder, MIB)
    assert lower.nbytes > 2 * MIB
    lower.put([(key(99), entry(99))])
    assert lower.nbytes <= MIB
    assert (folder / FILE).stat().st_size <= MIB
    assert same(lower.get(key(99)), entry(99))
    assert same(lower.get(key(29)), entry(29, rows=6000))
    assert lower.get(key(0)) is None
    lower.close()


# The file


def test_a_folder_has_the_tables_that_other_versions_look_for(disk: DiskStore, folder: Path) -> None:
    disk.put([(key(3), entry(3))])
    with sql(folder) as connection:
        assert connection.execute("SELECT key, data FROM entries").fetchall() == [
            (key(3), entry(3).to_bytes(key(3)))
        ]
        assert connection.execute("SELECT entries FROM counts").fetchall() == [(1,)]
        settings = ("application_id", "user_version", "page_size", "auto_vacuum")
        found = {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in settings}
        ours = int.from_bytes(b"mxsd", "big")
        assert found == {"application_id": ours, "user_version": 1, "page_size": PAGE, "auto_vacuum": 2}


def test_what_a_process_left_that_died_creating_is_used(folder: Path) -> None:
    folder.mkdir(parents=True)
    with sql(folder) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    assert (folder / FILE).stat().st_size == PAGE
    # A limit beyond what any disk has is no reason to fail.
    with closing(DiskStore(folder, 200_000_000_000 * MIB)) as store:
        store.put([(key(1), entry(1))])
        assert same(store.get(key(1)), entry(1))


# Entries that are not what they seem


def test_a_damaged_entry_is_dropped(disk: DiskStore, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = (entry(0).to_bytes(key(0))[:-1] + b"x", entry(7).to_bytes(key(7)), 7, 1.5, "text", b"")
    disk.put([(key(number), entry(number)) for number in range(len(odd) + 1)])
    with sql(folder) as connection:
        for number, data in enumerate(odd):
            connection.execute("UPDATE entries SET data = ? WHERE key = ?", (data, key(number)))
    # A reader of all entries must be able to stop among damaged ones, however many there are.
    assert [found is None for _, found in disk.newest()] == [False] + [True] * len(odd)
    assert numbers(disk) == [len(odd)]
    assert [disk.get(key(number)) for number in range(len(odd))] == [None] * len(odd)
    assert same(disk.get(key(len(odd))), entry(len(odd)))
    assert caplog.text.count("holds entries that are damaged") == 1
    assert len(disk) == 1


def test_a_lock_is_waited_for_once_and_reported_once(
    disk: DiskStore, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_module, "PAUSE_SECONDS", 60.0)
    disk.put([(key(1), entry(1))])
    with sql(folder) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        started = time.monotonic()
        assert all(disk.get(key(1)) is None for _ in range(1000))
        for number in range(100):
            disk.put([(key(number), entry(number))])
            disk.drop(key(number))
        assert time.monotonic() - started < 200 * disk_module.LOCK_SECONDS
    assert caplog.text.count("was locked for too long") == 1


def test_entries_cleared_behind_a_lock_are_gone(disk: DiskStore, folder: Path, without_pauses: None) -> None:
    disk.put([(key(1), entry(1))])
    with sql(folder) as connection:
        # Others may read, but not write.
        connection.execute("BEGIN IMMEDIATE")
        disk.clear()
        assert disk.get(key(1)) is None
        assert len(disk) == 0
    assert disk.get(key(1)) is None
    disk.put([(key(2), entry(2))])
    assert numbers(disk) == [2]
    with sql(folder) as connection:
        connection.execute("BEGIN IMMEDIATE")
        disk.clear()
    disk.close()
    with closing(DiskStore(folder, 4 * MIB)) as next_start:
        assert numbers(next_start) == []


def test_a_second_engine_leaves_the_locks_of_the_first(disk: DiskStore, folder: Path) -> None:
    disk.put([(key(1), entry(1))])
    database: Any = disk._database
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
    opening = threading.Thread(target=lambda: DiskStore(folder, 4 * MIB).close())
    with database.connection() as connection:
        connection.execute("BEGIN IMMEDIATE")
        opening.start()
        opening.join(0.2)
        other = subprocess.run([sys.executable, "-c", code, folder / FILE], capture_output=True, check=False)
        assert b"database is locked" in other.stderr
        connection.execute("COMMIT")
    opening.join(600)
    assert not opening.is_alive()


def unchanged(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {str(file): file.read_bytes() for file in files if file.is_file()}


def refuses(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The log lines for a folder that serves as if nothing were ever stored in it."""
    store = DiskStore(folder, 4 * MIB)
    store.put([(key(1), entry(1))])
    assert store.get(key(1)) is None
    assert numbers(store) == []
    store.clear()
    store.drop(key(1))
    assert (len(store), store.nbytes, store.evictions) == (0, 0, 0)
    store.close()
    return caplog.text


def test_a_bad_folder_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, without_pauses: None) -> None:
    file = tmp_path / "a\nWARNING forged\x1b[2J"
    file.write_text("of a user")
    before = unchanged(tmp_path)
    for folder in (file, file / "below", *map(Path, ("a\0b", "\udcff/x" * 2000, "/proc/nothing/here"))):
        caplog.clear()
        log = refuses(folder, caplog)
        assert "cached in memory only" in log
        if tmp_path in folder.parents:
            assert "name a folder that can be written to (cache_dir)" in log
        assert all(record.getMessage().isprintable() for record in caplog.records)
    assert unchanged(tmp_path) == before
    assert os.listdir(tmp_path) == [file.name]


def test_other_databases_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture, without_pauses: None) -> None:
    for statement in (
        "CREATE TABLE entries (sequence, key, data)",
        "PRAGMA application_id = 77",
        "PRAGMA journal_mode = WAL",
        "PRAGMA user_version = 2",
    ):
        later, folder = "user_version" in statement, tmp_path / statement
        caplog.clear()
        if later:
            with closing(DiskStore(folder, 4 * MIB)) as store:
                store.put([(key(1), entry(1))])
        folder.mkdir(parents=True, exist_ok=True)
        with sql(folder) as connection:
            if "entries" not in statement and not later:
                connection.execute("CREATE TABLE of_a_user (name)")
            connection.execute(statement)
        before = unchanged(folder)
        log = refuses(folder, caplog)
        assert ("was written by another version of maxsimd" if later else "belongs to another program") in log
        assert "move it away, or name another folder (cache_dir)" in log
        assert unchanged(folder) == before


# Damage: test_damaged_caches.py has every kind of it


def test_a_damaged_database_is_set_aside_and_the_last_such_stays(
    disk: DiskStore, folder: Path, caplog: pytest.LogCaptureFixture, without_pauses: None
) -> None:
    sizes = []
    for number in range(3):
        disk.put([(key(number), entry(number, rows=10_000 * (number + 1)))])
        sizes.append((folder / FILE).stat().st_size)
        (folder / FILE).write_bytes(b"x" * sizes[-1])
        assert disk.get(key(number)) is None
        assert disk.get(key(number)) is None
        assert (folder / DAMAGED_FILE).stat().st_size == sizes[-1]
    assert len(set(sizes)) == 3
    assert caplog.text.count("was damaged") == 3
    assert {path.name for path in folder.iterdir()} == {FILE, f"{FILE}-journal", DAMAGED_FILE}
    disk.clear()
    assert not (folder / DAMAGED_FILE).exists(), "it has embeddings too"
    damage = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CORRUPT_INDEX, sqlite3.SQLITE_NOTADB}
    others = {sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR_READ}
    for code in damage | others:
        error = sqlite3.DatabaseError("reason")
        error.sqlite_errorcode = code
        assert disk_module.is_damage(error) is (code in damage), code
    assert not disk_module.is_damage(OSError(12, "reason"))
    assert not disk_module.is_damage(MemoryError())


def test_a_full_disk_is_reported_and_still_read(
    disk: DiskStore, folder: Path, caplog: pytest.LogCaptureFixture, without_pauses: None
) -> None:
    disk.put([(key(1), entry(1))])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / FILE).stat().st_size + PAGE, hard))
    try:
        for number in range(2, 5):
            disk.put([(key(number), entry(number, rows=30_000))])
        assert same(disk.get(key(1)), entry(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("cannot be written to") == 1
    disk.put([(key(2), entry(2, rows=30_000))])
    assert numbers(disk) == [2, 1]
    assert not (folder / DAMAGED_FILE).exists()


def test_a_failure_that_comes_again_is_logged_again(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, without_pauses: None
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(CachedEmbedding, "to_bytes", fail)
            for number in range(5):
                disk.put([(key(number), entry(number))])
        disk.put([(key(1), entry(1))])
    with monkeypatch.context() as patched:
        patched.setattr(CachedEmbedding, "from_bytes", fail)
        assert disk.get(key(1)) is None
    assert numbers(disk) == [1], "what could not be read is kept"
    assert caplog.text.count("cannot be written to: MemoryError") == 2
    assert caplog.text.count("cannot be read: MemoryError") == 1
    monkeypatch.setattr(disk_module, "SECONDS_BETWEEN_WARNINGS", 0.0)
    monkeypatch.setattr(CachedEmbedding, "to_bytes", fail)
    for _ in range(3):
        disk.put([(key(1), entry(1))])
    assert caplog.text.count("cannot be written to") == 5
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
