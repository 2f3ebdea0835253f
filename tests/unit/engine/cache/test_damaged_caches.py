"""Whatever damage comes to a cache's folder, and whenever: the process lives, nothing wrong is read, what is
not ours is left alone, and the log says what happened. Another process runs it all: its end would show."""

import itertools
import json
import multiprocessing
import random
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from maxsimd.engine.cache.database import DAMAGED_FILE, FILE
from maxsimd.engine.cache.disk import DiskStore
from tests.damage import DAMAGES, heed_permissions
from tests.forked import Program
from tests.unit.engine.cache.damaged_folders import MOMENTS, NUMBER, entry
from tests.unit.engine.cache.entries import MIB, key
from tests.waiting import wait_for

NOT_OURS = "move it away, or name another folder"
WRITING = "cannot be written to: "
REPLACED = "was removed or replaced"
# What is expected after each damage: whether the cache works again by itself, and what the log says of it,
# which is None where it may say nothing. A connection reads the header and the definitions of tables when it
# is opened, and a second one is opened only where two threads use the database at once.
EXPECTED: dict[str, tuple[bool, str | None]] = {
    "truncated to nothing": (True, "no such table"),
    "truncated to half": (True, "was damaged"),
    "truncated to a page": (True, "was damaged"),
    "truncated to a few bytes": (True, "was damaged"),
    "second half zeroed": (True, "was damaged"),
    "random bytes in the middle": (True, "was damaged"),
    "header overwritten": (True, "was damaged"),
    "header asks for a log": (True, None),
    "header of a later format": (True, None),
    "table definitions overwritten": (True, None),
    "garbage appended": (True, ""),
    "file replaced by a directory": (False, NOT_OURS),
    "file replaced by a pipe": (False, NOT_OURS),
    "file deleted": (True, REPLACED),
    "folder deleted": (True, REPLACED),
    "journal overwritten": (True, ""),
    "read-only": (False, WRITING),
    "earlier version beside it": (True, ""),
    "file replaced by another program's": (False, NOT_OURS),
    "file overwritten by another program's": (False, NOT_OURS),
    "other tables": (True, "was damaged"),
    "number of entries lost": (True, "was damaged"),
}
# At a start some of it is seen otherwise, and a folder that is not there is none that was removed.
EXPECTED_AT_START = EXPECTED | {
    "truncated to nothing": (True, ""),
    "header asks for a log": (True, "was damaged"),
    "header of a later format": (True, "was damaged"),
    "table definitions overwritten": (True, "was damaged"),
    "file deleted": (True, ""),
    "folder deleted": (True, ""),
    "earlier version beside it": (True, "holds data.mdb and lock.mdb of an earlier version"),
}
# What is damaged in the middle of a database may be dropped before it is noticed.
EXPECTED_IN_A_CLEAR = EXPECTED | {
    "second half zeroed": (True, None),
    "random bytes in the middle": (True, None),
    "other tables": (True, None),
}
EXPECTED_AT = {
    "at start": EXPECTED_AT_START,
    "while serving": EXPECTED,
    "in a clear": EXPECTED_IN_A_CLEAR,
}
# Nothing is lost of these, until a clear.
HARMLESS = ("garbage appended", "journal overwritten", "read-only", "earlier version beside it")


@dataclass(frozen=True)
class Run:
    """What the process reported of each cell of the table, and how it ended."""

    outcomes: dict[tuple[str, str], dict[str, object]]
    last: tuple[str, str]
    status: int
    errors: str


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Run:
    module, folder = "tests.unit.engine.cache.damaged_folders", tmp_path_factory.mktemp("caches")
    out, error = folder.with_suffix(".out"), folder.with_suffix(".err")
    status = Program([str(folder)], module=module, before=heed_permissions).start(out, error).wait(300)
    outcomes = {}
    last = ("", "")
    for line in out.read_text("utf-8").splitlines():
        report = json.loads(line)
        if "cell" in report:
            damage, moment = report["cell"]
            last = (damage, moment)
        else:
            outcomes[last] = report
    return Run(outcomes, last, status, error.read_text("utf-8"))


def test_no_damage_ends_the_process_or_raises_anything(table: Run) -> None:
    assert table.status == 0, f"{table.last}: status {table.status}\n{table.errors}"
    assert table.errors == ""
    assert len(table.outcomes) == len(DAMAGES) * len(MOMENTS)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_damaged_cache_serves_nothing_wrong_and_recovers(table: Run, moment: str) -> None:
    for damage in DAMAGES:
        outcome, case = table.outcomes[damage, moment], f"{damage}: {table.outcomes[damage, moment]}"
        works, message = EXPECTED_AT[moment][damage]
        assert (outcome["stored"], outcome["wrong"], outcome["works"]) == (NUMBER, 0, works), case
        log: Any = outcome["log"]
        if message is not None:
            assert any(message in line for line in log) if message else log == [], case
        assert len(log) <= 5, case
        assert outcome["mapped"] == [], case
        if moment == "in a clear":
            assert outcome["found"] == 0, case
        elif damage in HARMLESS:
            assert outcome["found"] == NUMBER, case
        # Only a damaged file of ours is set aside.
        files: Any = outcome["files"]
        # What is noticed in a clear is removed by it.
        is_kept = message == "was damaged" and (moment != "in a clear" or damage == "other tables")
        assert (DAMAGED_FILE in files) == is_kept or message is None, case
        assert set(files) <= {FILE, f"{FILE}-journal", DAMAGED_FILE, "data.mdb", "lock.mdb"}, case
        assert not outcome["touched"], case


def _write_for_ever(folder: Path) -> None:
    store = DiskStore(folder, 8 * MIB)
    for i in itertools.count(step=5):
        store.put([(key(i + k), entry((i + k) % 1000)) for k in range(5)])


def test_killing_a_writer_never_leaves_anything_wrong(tmp_path: Path) -> None:
    """Processes are killed while they write; every start after it works, every entry is right."""
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
