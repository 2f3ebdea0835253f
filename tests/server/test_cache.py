"""The embedding cache over HTTP, after restarts, and damaged: a server serves on, scores as it would without
a cache, and its log says what happened.

What becomes of the files, and more kinds of damage, are in tests/unit/engine/cache/test_damaged_caches.py."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine.cache import guarded
from maxsimd.engine.cache.database import FILE
from tests.damage import DAMAGES, heed_permissions, undo
from tests.server.conftest import Server, StartServer
from tests.waiting import wait_for

# Without memory, so that whatever is cached is read from disk.
OPTIONS = ("--dtype", "float32", "--threads", "1", "--cache-mb", "0", "--cache-dir")


def rerank(server: Server, documents: list[str], **options: Any) -> Any:
    body = {"query": "how is a file read", "documents": documents} | options
    response = httpx.post(server.url + "/rerank", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def scores(answer: Any) -> list[float]:
    ordered = sorted(answer["results"], key=lambda item: item["index"])
    return [item["relevance_score"] for item in ordered]


def cached(answer: Any) -> int:
    return int(answer["usage"].get("prompt_tokens_details", {}).get("cached_documents", 0))


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    return [pair.document[:150] for pair in pairs[:12]]


def test_a_folder_outlives_a_server_that_is_killed(
    start_server: StartServer, stanford_colbert: str, tmp_path: Path, documents: list[str]
) -> None:
    folder = str(tmp_path / "cache")
    server = start_server(stanford_colbert, "--cache-dir", folder)
    first, second = rerank(server, documents), rerank(server, documents)
    assert (cached(first), cached(second)) == (0, 12)
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    np.testing.assert_allclose(scores(first), scores(second), atol=1e-3)
    counts = [server.metric(f"maxsimd_cache_{name}_total") for name in ("hits", "misses")]
    assert counts == [12, 12]
    wait_for(lambda: server.metric("maxsimd_cache_entries") == 12)
    assert server.metric("maxsimd_cache_memory_bytes") > 10_000
    assert [cached(rerank(server, documents, cache=how)) for how in ("bypass", "refresh")] == [0, 0]
    wait_for(lambda: server.metric("maxsimd_cache_staged") == 0)
    server.process.kill()
    server.process.wait()

    again = start_server(stanford_colbert, "--cache-dir", folder)
    third = rerank(again, documents)
    assert cached(third) == 12
    np.testing.assert_allclose(scores(first), scores(third), atol=1e-3)
    assert again.metric("maxsimd_cache_disk_bytes") > 10_000
    assert httpx.delete(again.url + "/cache").status_code == 204
    assert again.metric("maxsimd_cache_entries") == 0
    assert cached(rerank(again, documents)) == 0


def _heed_permissions_and_pause_shortly() -> None:
    """Pauses that are short enough for as many failures as there are here."""
    heed_permissions()
    guarded.PAUSE_SECONDS = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches") / "cache"


@pytest.fixture(scope="module")
def damaged(module_starter: StartServer, stanford_colbert: str, folder: Path) -> Server:
    """A server of which this damages the cache; started with a file in place of its folder."""
    folder.write_text("of a user")
    options = (stanford_colbert, *OPTIONS, str(folder))
    return module_starter(*options, before=_heed_permissions_and_pause_shortly)


@pytest.fixture(scope="module")
def expected(damaged: Server, documents: list[str]) -> list[float]:
    return scores(rerank(damaged, documents, cache="bypass"))


def wait_until_cached(server: Server, folder: Path, documents: list[str]) -> None:
    if folder.is_file():
        folder.unlink()
    wait_for(lambda: cached(rerank(server, documents)) == len(documents))


def count_warnings(log: str) -> int:
    return log.count("the embedding cache in")


@pytest.mark.one_process
def test_a_file_in_place_of_the_cache_folder_stays(
    damaged: Server, folder: Path, documents: list[str], expected: list[float]
) -> None:
    assert "cached in memory only" in damaged.log
    assert "name a folder that can be written to (--cache-dir)" in damaged.log
    for _ in range(2):
        np.testing.assert_allclose(scores(rerank(damaged, documents)), expected, atol=1e-4)
    assert httpx.delete(damaged.url + "/cache").status_code == 204
    assert folder.read_text() == "of a user"
    assert count_warnings(damaged.log) == 1
    wait_until_cached(damaged, folder, documents)
    np.testing.assert_allclose(scores(rerank(damaged, documents)), expected, atol=1e-4)


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("damage", "in_delete"),
    [
        ("truncated to half", False),
        ("header overwritten", True),
        ("folder deleted", False),
        ("read-only", True),
        ("file replaced by another program's", False),
    ],
)
def test_a_server_survives_damage_to_its_cache(
    damaged: Server, folder: Path, documents: list[str], expected: list[float], damage: str, in_delete: bool
) -> None:
    wait_until_cached(damaged, folder, documents)
    # What is cached is found in memory while a file that was damaged before is still being made anew.
    wait_for((folder / FILE).is_file)
    before = len(damaged.log)
    DAMAGES[damage](folder)
    if in_delete:
        assert httpx.delete(damaged.url + "/cache").status_code == 204
    for i in range(2):
        # With a document that is new, so that something is written.
        found = scores(rerank(damaged, [*documents, f"new {i} {damage}"]))
        np.testing.assert_allclose(found[:-1], expected, atol=1e-4)
    assert damaged.metric("maxsimd_cache_disk_bytes") >= 0
    wait_for(lambda: count_warnings(damaged.log[before:]) > 0)
    assert count_warnings(damaged.log[before:]) <= 5, damaged.log[before:]
    undo(folder)
