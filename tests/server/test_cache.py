"""The embedding cache over HTTP: what requests may ask of it, what answers say of it, and restarts."""

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


def test_a_second_request_is_answered_from_the_cache(start_server: StartServer, pairs: list[Pair]) -> None:
    server = start_server()
    documents = [f"{i} {pair.document[:150]}" for i, pair in enumerate(pairs[:12])]
    first, second = rerank(server, documents), rerank(server, documents)
    assert "prompt_tokens_details" not in first["usage"]
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_documents"] == 12
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    np.testing.assert_allclose(scores(first), scores(second), atol=1e-3)
    assert server.metric("maxsimd_cache_hits_total") == 12
    assert server.metric("maxsimd_cache_misses_total") == 12
    wait_for(lambda: server.metric("maxsimd_cache_entries") == 12)
    assert server.metric("maxsimd_cache_memory_bytes") > 10_000

    bypassed = rerank(server, documents, cache="bypass")
    assert "prompt_tokens_details" not in bypassed["usage"]
    np.testing.assert_allclose(scores(bypassed), scores(second), atol=1e-3)
    assert httpx.delete(server.url + "/cache").status_code == 204
    assert server.metric("maxsimd_cache_entries") == 0
    assert "prompt_tokens_details" not in rerank(server, documents)["usage"]
    assert "prompt_tokens_details" not in rerank(server, documents, cache="refresh")["usage"]


@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_folder_outlives_the_server(
    start_server: StartServer, tmp_path: Path, pairs: list[Pair], kill: bool
) -> None:
    folder = str(tmp_path / "cache")
    documents = [f"{i} {pair.document[:150]}" for i, pair in enumerate(pairs[:12])]
    server = start_server("--cache-dir", folder)
    first = rerank(server, documents)
    if kill:
        wait_for(lambda: server.metric("maxsimd_cache_staged") == 0)
        server.process.kill()
        server.process.wait()
    else:
        assert server.terminate() == 0
    again = start_server("--cache-dir", folder)
    second = rerank(again, documents)
    assert second["usage"]["prompt_tokens_details"]["cached_documents"] == 12
    np.testing.assert_allclose(scores(first), scores(second), atol=1e-3)
    assert again.metric("maxsimd_cache_disk_bytes") > 10_000


@pytest.mark.exhaustive
def test_two_servers_share_a_folder(start_server: StartServer, tmp_path: Path, pairs: list[Pair]) -> None:
    folder = str(tmp_path / "cache")
    documents = [f"{i} {pair.document[:150]}" for i, pair in enumerate(pairs[:20])]
    one, other = (start_server("--cache-dir", folder) for _ in range(2))
    first = rerank(one, documents)
    wait_for(lambda: one.metric("maxsimd_cache_staged") == 0)
    second = rerank(other, documents)
    assert second["usage"]["prompt_tokens_details"]["cached_documents"] == 20
    np.testing.assert_allclose(scores(first), scores(second), atol=1e-3)
