"""The embedding cache over HTTP and after a restart; damage to it is in
tests/unit/engine/cache/test_damaged_caches.py."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from maxsimd.bench.datasets import Pair
from tests.server.conftest import Server, StartServer
from tests.waiting import wait_for


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
