"""A server whose cache folder is damaged, taken away, filled or something else: it serves on, scores as it
would without a cache, and its log says what happened.

What becomes of the files, and more kinds of damage, are in tests/unit/engine/cache/test_damaged_caches.py."""

import resource
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine.cache import guarded
from maxsimd.engine.cache.database import FILE, PAGE
from tests.damage import DAMAGES, heed_permissions, undo
from tests.server.conftest import Server, StartServer
from tests.server.test_cache import rerank, scores
from tests.waiting import wait_for

pytestmark = pytest.mark.one_process

# Without memory, so that whatever is cached is read from disk.
OPTIONS = ("--dtype", "float32", "--threads", "1", "--cache-mb", "0", "--cache-dir")


def _heed_permissions_and_pause_shortly() -> None:
    """Pauses that are short enough for as many failures as there are here."""
    heed_permissions()
    guarded.PAUSE_SECONDS = 0.05


KINDS = (
    "truncated to nothing",
    "truncated to half",
    "truncated to a page",
    "second half zeroed",
    "random bytes in the middle",
    "header overwritten",
    "garbage appended",
    "file replaced by a directory",
    "file deleted",
    "folder deleted",
    "journal overwritten",
    "read-only",
    "earlier version beside it",
    "file replaced by another program's",
)
# What harms nothing; and what is not noticed where SQLite has those few pages in memory still, or drops them.
HARMLESS = {"garbage appended", "journal overwritten", "earlier version beside it"}
UNREAD = {"second half zeroed", "random bytes in the middle"}
# A file that is damaged, gone, another's or not to be written to.
TYPICAL = (
    ("truncated to half", "while serving"),
    ("header overwritten", "in DELETE /cache"),
    ("folder deleted", "while serving"),
    ("read-only", "in DELETE /cache"),
    ("file replaced by another program's", "while serving"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches") / "cache"


@pytest.fixture(scope="module")
def server(module_starter: StartServer, folder: Path) -> Server:
    """Started with a file in place of its folder."""
    folder.write_text("of a user")
    return module_starter(*OPTIONS, str(folder), before=_heed_permissions_and_pause_shortly)


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    return [pair.document[:150] for pair in pairs[:12]]


@pytest.fixture(scope="module")
def expected(server: Server, documents: list[str]) -> list[float]:
    return scores(rerank(server, documents, cache="bypass"))


def count_cached(answer: dict[str, dict[str, dict[str, int]]]) -> int:
    return answer["usage"].get("prompt_tokens_details", {}).get("cached_documents", 0)


def wait_until_cached(server: Server, documents: list[str]) -> None:
    deadline = time.monotonic() + 20
    while count_cached(rerank(server, documents)) < len(documents):
        assert time.monotonic() < deadline, f"nothing is cached any more:\n{server.log}"
        time.sleep(0.02)


def count_warnings(log: str) -> int:
    return log.count("the embedding cache in")


def test_a_file_in_place_of_the_cache_folder_stays(
    server: Server, folder: Path, documents: list[str], expected: list[float]
) -> None:
    assert "cached in memory only" in server.log
    assert "name a folder that can be written to (--cache-dir)" in server.log
    for _ in range(2):
        np.testing.assert_allclose(scores(rerank(server, documents)), expected, atol=1e-4)
    assert httpx.delete(server.url + "/cache").status_code == 204
    assert folder.read_text() == "of a user"
    assert count_warnings(server.log) == 1
    folder.unlink()
    wait_until_cached(server, documents)
    np.testing.assert_allclose(scores(rerank(server, documents)), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("damage", "moment"),
    [
        pytest.param(damage, moment, marks=() if (damage, moment) in TYPICAL else pytest.mark.exhaustive)
        for damage in KINDS
        for moment in ("while serving", "in DELETE /cache")
    ],
)
def test_a_server_survives_damage_to_its_cache(
    server: Server, folder: Path, documents: list[str], expected: list[float], damage: str, moment: str
) -> None:
    if folder.is_file():
        folder.unlink()
    wait_until_cached(server, documents)
    # What is cached is found in memory while a file that was damaged before is still being made anew.
    deadline = time.monotonic() + 20
    while not (folder / FILE).is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    before = len(server.log)
    DAMAGES[damage](folder)
    if moment == "in DELETE /cache":
        assert httpx.delete(server.url + "/cache").status_code == 204
    for i in range(2):
        # With a document that is new, so that something is written.
        found = scores(rerank(server, [*documents, f"new {i} {damage} {moment}"]))
        np.testing.assert_allclose(found[:-1], expected, atol=1e-4)
    assert server.metric("maxsimd_cache_disk_bytes") >= 0
    if damage not in HARMLESS | UNREAD:
        wait_for(lambda: count_warnings(server.log[before:]) > 0)
    assert count_warnings(server.log[before:]) <= (0 if damage in HARMLESS else 5), server.log[before:]
    undo(folder)


def test_a_server_goes_on_while_its_cache_is_locked(
    server: Server, folder: Path, documents: list[str], expected: list[float]
) -> None:
    if folder.is_file():
        folder.unlink()
    wait_until_cached(server, documents)
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        np.testing.assert_allclose(scores(rerank(server, documents[:3])), expected[:3], atol=1e-4)
        assert "was locked for too long" in server.log
        assert httpx.delete(server.url + "/cache").status_code == 204
    assert count_cached(rerank(server, documents)) <= 3, "what was encoded after the DELETE"
    wait_until_cached(server, documents)


def _limit_files() -> None:
    """As if the disk were full: no file can grow beyond a MiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_a_damaged_cache_and_a_full_disk_stop_no_server(
    start_server: StartServer,
    server: Server,
    folder: Path,
    pairs: list[Pair],
    documents: list[str],
    expected: list[float],
    tmp_path: Path,
) -> None:
    if folder.is_file():
        folder.unlink()
    wait_until_cached(server, documents)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / FILE).write_bytes((folder / FILE).read_bytes()[: 5 * PAGE])
    started = start_server(*OPTIONS, str(tmp_path / "cache"), before=_limit_files)
    assert started.log.count("was damaged") == 1
    for _ in range(2):
        found = scores(rerank(started, documents + [pair.document for pair in pairs[12:30]]))
        np.testing.assert_allclose(found[:12], expected, atol=1e-4)
    wait_for(lambda: "cannot be written to" in started.log)
    assert count_warnings(started.log) <= 4
    assert httpx.delete(started.url + "/cache").status_code == 204
    assert started.terminate() == 0
