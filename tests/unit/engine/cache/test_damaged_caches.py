"""Damage of every kind, met in another process: nothing wrong is read, and the log says what happened."""

import itertools
import multiprocessing
import os
import pickle
import random
import stat
import threading
import time
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.cache import disk as disk_module
from maxsimd.engine.cache.disk import FILE, DiskStore
from maxsimd.engine.cache.store import MemoryStore
from tests.damage import DAMAGES, heed_permissions, undo
from tests.forked import Forked
from tests.logged import logged
from tests.unit.engine.cache.entries import DAMAGED_FILE, MIB, key, same
from tests.waiting import wait_for

MOMENTS = ("at start", "while serving", "in a clear")
SIZES = (3, 300, 1300, 4000)
NUMBER = 60  # of entries
NOT_OURS = "move it away, or name another folder"
# Expectations after each damage: whether the cache works again by itself, and what the log says of it,
# which is None where it may say nothing. A connection reads the header and the definitions of tables when it
# is opened, and a second one is opened only where two threads use the database at once.
EXPECTED: dict[str, tuple[bool, str | None]] = {
    **dict.fromkeys(DAMAGES, (True, "was damaged")),
    "truncated to nothing": (True, "no such table"),
    **dict.fromkeys(("header asks for a log", "header of a later format"), (True, None)),
    "table definitions overwritten": (True, None),
    **dict.fromkeys(("garbage appended", "journal overwritten", "earlier version beside it"), (True, "")),
    **dict.fromkeys((damage for damage in DAMAGES if " by a" in damage), (False, NOT_OURS)),
    **dict.fromkeys(("file deleted", "folder deleted"), (True, "was removed or replaced")),
    "read-only": (False, "cannot be written to: "),
}
# At a start some of it is seen otherwise, and a folder that is not there is none that was removed.
EXPECTED_AT_START = EXPECTED | {
    **dict.fromkeys(("truncated to nothing", "file deleted", "folder deleted"), (True, "")),
    **dict.fromkeys((damage for damage in EXPECTED if EXPECTED[damage][1] is None), (True, "was damaged")),
    "earlier version beside it": (True, "holds data.mdb and lock.mdb of an earlier version"),
}
# Damage in the middle of a database may be dropped before it is noticed.
EXPECTED_IN_A_CLEAR = EXPECTED | dict.fromkeys(
    ("second half zeroed", "random bytes in the middle", "other tables"), (True, None)
)
EXPECTED_AT = {"at start": EXPECTED_AT_START, "while serving": EXPECTED, "in a clear": EXPECTED_IN_A_CLEAR}
# Nothing is lost of these, until a clear.
HARMLESS = ("garbage appended", "journal overwritten", "read-only", "earlier version beside it")


@cache
def entry(number: int) -> CachedEmbedding:
    rows = torch.randn(SIZES[number % 4], 16, generator=torch.Generator().manual_seed(number))
    return CachedEmbedding(rows, None, number, number % 3 == 0)


def open_cache(folder: Path) -> EmbeddingCache:
    """Without memory, so that all is read from disk."""
    return EmbeddingCache(b"", "float32", MemoryStore(0), DiskStore(folder, 64 * MIB))


def read(store: EmbeddingCache, numbers: range) -> tuple[int, int]:
    """How many entries there are, and how many of these are wrong."""
    found = {number: got for number in numbers if (got := store.get(key(number))) is not None}
    return len(found), sum(not same(got, entry(number)) for number, got in found.items())


def works(store: EmbeddingCache) -> bool:
    for _ in range(25):
        store.put([(key(10_000), entry(10_000))])
        if read(store, range(10_000, 10_001)) == (1, 0):
            return True
        time.sleep(disk_module.PAUSE_SECONDS / 5)
    return False


def foreign(folder: Path) -> dict[str, bytes | None]:
    """Files in a folder that are not ours: the kind and the content of each."""
    found: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        try:
            data = path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None
        except FileNotFoundError:  # a journal of ours, which comes and goes
            continue
        if data is None or path.suffix == ".mdb" or b"of a user" in data:
            found[str(path)] = data
    return found


def run(folder: Path, damage: str, moment: str, log: list[str]) -> dict[str, Any]:
    numbers = range(NUMBER)
    store = open_cache(folder)
    store.put([(key(number), entry(number)) for number in numbers])
    stored, _ = read(store, numbers)
    if moment == "at start":
        store.close()
    log.clear()
    DAMAGES[damage](folder)
    before = foreign(folder)
    if moment == "at start":
        store = open_cache(folder)
        store.wait_until_warm(60)
    elif moment == "in a clear":
        store.clear()
    found, wrong = read(store, numbers)
    store.put([(key(number), entry(number)) for number in range(100, 120)])
    store.drop(key(0))
    _, wrong_later = read(store, range(100, 120))
    outcome = {
        "stored": stored, "found": found, "wrong": wrong + wrong_later, "works": works(store),
        "log": [*log], "files": sorted(path.name for path in folder.iterdir()),
        "mapped": [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line],
        "touched": foreign(folder) != before,
    }  # fmt: skip
    store.close()
    return outcome


def meet_all(root: Path, reports: Path) -> None:
    threading.excepthook = lambda _: os._exit(1)
    heed_permissions()
    disk_module.PAUSE_SECONDS = 0.02
    for moment, damage in itertools.product(MOMENTS, DAMAGES):
        folder = root / f"{moment} {damage}"
        with logged() as log, reports.open("ab") as file:
            pickle.dump(((damage, moment), run(folder, damage, moment, log)), file)
        undo(folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    folder = tmp_path_factory.mktemp("caches")
    status = Forked(meet_all, folder, folder / "reports", files=(0, 1, 2)).wait(300)
    with (folder / "reports").open("rb") as file, suppress(EOFError):
        while True:
            cell, found[cell] = pickle.load(file)
    assert (status, len(found)) == (0, len(DAMAGES) * len(MOMENTS)), f"it ended behind {[*found][-1:]}"
    return found


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_damaged_cache_recovers(outcomes: dict[tuple[str, str], dict[str, Any]], moment: str) -> None:
    for damage in DAMAGES:
        outcome = outcomes[damage, moment]
        case, log, files = f"{damage}: {outcome}", outcome["log"], outcome["files"]
        works, message = EXPECTED_AT[moment][damage]
        assert (outcome["stored"], outcome["wrong"], outcome["works"]) == (NUMBER, 0, works), case
        if message is not None:
            assert any(message in line for line in log) if message else log == [], case
        assert len(log) <= 5, case
        assert outcome["mapped"] == [], case
        if moment == "in a clear":
            assert outcome["found"] == 0, case
        elif damage in HARMLESS:
            assert outcome["found"] == NUMBER, case
        # Only a damaged file of ours is set aside. What is noticed in a clear is removed by it.
        is_kept = message == "was damaged" and (moment != "in a clear" or damage == "other tables")
        assert (DAMAGED_FILE in files) == is_kept or message is None, case
        assert set(files) <= {FILE, f"{FILE}-journal", DAMAGED_FILE, "data.mdb", "lock.mdb"}, case
        assert not outcome["touched"], case


def _write_for_ever(folder: Path) -> None:
    store = DiskStore(folder, 8 * MIB)
    for i in itertools.count(step=5):
        store.put([(key(i + k), entry((i + k) % 1000)) for k in range(5)])


def test_killing_a_writer_never_leaves_anything_wrong(tmp_path: Path) -> None:
    context, draw = multiprocessing.get_context("fork"), random.Random(0)
    for _ in range(4):
        writer = context.Process(target=_write_for_ever, args=(tmp_path / "cache",), daemon=True)
        writer.start()
        wait_for((tmp_path / "cache" / FILE).exists)
        time.sleep(0.1 + 0.1 * draw.random())
        writer.kill()
        writer.join()
        with closing(DiskStore(tmp_path / "cache", 8 * MIB)) as store:
            for i in range(0, 3000, 7):
                found = store.get(key(i))
                assert found is None or torch.equal(found.rows, entry(i % 1000).rows)
    assert DAMAGED_FILE not in {path.name for path in tmp_path.rglob("*")}
