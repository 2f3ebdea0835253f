"""Whatever damage comes to a cache's folder, and whenever: the process lives, nothing wrong is read, what is
not ours is left alone, and the log says what happened. Another process runs it all: its end would show."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from maxsimd.engine.cache.database import DAMAGED_FILE, FILE
from tests.damage import DAMAGES, heed_permissions
from tests.unit.engine.cache.damaged_folders import MOMENTS

ROOT = Path(__file__).parents[4]

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
    command = [
        sys.executable,
        "-m",
        "tests.unit.engine.cache.damaged_folders",
        str(tmp_path_factory.mktemp("caches")),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        preexec_fn=heed_permissions,
    )
    outcomes = {}
    last = ("", "")
    for line in done.stdout.splitlines():
        report = json.loads(line)
        if "cell" in report:
            damage, moment = report["cell"]
            last = (damage, moment)
        else:
            outcomes[last] = report
    return Run(outcomes, last, done.returncode, done.stderr)


def test_no_damage_ends_the_process_or_raises_anything(table: Run) -> None:
    assert table.status == 0, f"{table.last}: status {table.status}\n{table.errors}"
    assert table.errors == ""
    assert len(table.outcomes) == len(DAMAGES) * len(MOMENTS)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_serves_nothing_wrong_and_recovers(table: Run, damage: str, moment: str) -> None:
    outcome = table.outcomes[damage, moment]
    assert outcome["stored"] == 60
    assert outcome["wrong"] == 0
    works, message = EXPECTED_AT[moment][damage]
    assert outcome["works"] == works
    log = outcome["log"]
    assert isinstance(log, list)
    if message is not None:
        assert any(message in line for line in log) if message else log == [], log
    assert len(log) <= 5, log
    assert outcome["mapped"] == []
    if moment == "in a clear":
        assert outcome["found"] == 0
    elif damage in HARMLESS:
        assert outcome["found"] == 60


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_only_a_damaged_file_of_ours_is_set_aside(table: Run, damage: str, moment: str) -> None:
    outcome = table.outcomes[damage, moment]
    _, message = EXPECTED_AT[moment][damage]
    files = outcome["files"]
    assert isinstance(files, list)
    # What is noticed in a clear is removed by it.
    is_kept = message == "was damaged" and (moment != "in a clear" or damage == "other tables")
    assert (DAMAGED_FILE in files) == is_kept or message is None
    assert set(files) <= {FILE, f"{FILE}-journal", DAMAGED_FILE, "data.mdb", "lock.mdb"}
    assert not outcome["touched"], "a file that is not ours was changed"
