"""The routes that score and rank, over HTTP."""

import asyncio
from typing import Any

import httpx
import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from tests.server.conftest import Server

QUERY = "What is the capital of France?"
DOCUMENTS = ["Berlin is in Germany.", "Paris is the capital of France.", "Cats purr."]


def post(server: Server, path: str, body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_ranks_best_first(server: Server, path: str) -> None:
    answer = post(server, path, {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()
    assert answer["id"].startswith("rerank-")
    assert [result["index"] for result in answer["results"]] == [1, 0]
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[1]}
    assert answer["results"][0]["relevance_score"] > answer["results"][1]["relevance_score"]
    assert answer["meta"]["billed_units"] == {"search_units": 1}


def test_long_documents_are_cut_counted_and_told(server: Server) -> None:
    body = {"queries": QUERY, "documents": ["word " * 2000]}
    before = server.metric("maxsimd_truncated_inputs_total")
    response = post(server, "/score", body)
    assert response.json()["usage"]["prompt_tokens"] == 256 + 9
    assert response.json()["warnings"] == [response.headers["x-maxsimd-warnings"]]
    assert server.metric("maxsimd_truncated_inputs_total") == (before or 0) + 1
    fits = post(server, "/score", {"queries": QUERY, "documents": ["word"]})
    assert "warnings" not in fits.json()
    assert "x-maxsimd-warnings" not in fits.headers
    refused = post(server, "/score", body | {"long_documents": "error"})
    assert refused.status_code == 400
    assert "2002 tokens, but at most 256" in refused.json()["error"]["message"]
    answer = post(server, "/score", body | {"max_tokens_per_doc": 10}).json()
    assert answer["usage"]["prompt_tokens"] == 12 + 9


def test_the_server_scores_as_the_engine_does(server: Server, pairs: list[Pair]) -> None:
    documents = [pair.document for pair in pairs[:20]]

    async def score() -> list[float]:
        async with Engine(EngineConfig(dtype="float32")) as engine:
            return (await engine.score(pairs[0].query, documents, truncation=CUT_LONG)).scores

    body = {"queries": pairs[0].query, "documents": documents, "truncate_prompt_tokens": -1}
    answer = post(server, "/score", body).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx(asyncio.run(score()), abs=1e-3)
