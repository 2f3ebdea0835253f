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


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")]
)
def test_score_takes_every_pair_of_names(server: Server, path: str, names: tuple[str, str]) -> None:
    answer = post(server, path, {names[0]: QUERY, names[1]: DOCUMENTS}).json()
    assert answer["object"] == "list"
    assert answer["id"].startswith("score-")
    assert answer["model"] == "all-MiniLM-L6-v2"
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    scores = [item["score"] for item in answer["data"]]
    assert max(scores) == scores[1]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


def test_score_pairs_up_equal_lists(server: Server) -> None:
    answer = post(server, "/score", {"text_1": [QUERY] * 3, "text_2": DOCUMENTS}).json()
    one_to_many = post(server, "/score", {"text_1": QUERY, "text_2": DOCUMENTS}).json()
    for a, b in zip(answer["data"], one_to_many["data"], strict=True):
        assert a["score"] == pytest.approx(b["score"], abs=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_ranks_best_first(server: Server, path: str) -> None:
    answer = post(server, path, {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()
    assert answer["id"].startswith("rerank-")
    assert [result["index"] for result in answer["results"]] == [1, 0]
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[1]}
    assert answer["results"][0]["relevance_score"] > answer["results"][1]["relevance_score"]
    assert answer["meta"]["billed_units"] == {"search_units": 1}


def test_documents_may_be_objects_records_and_content_parts(server: Server) -> None:
    plain = post(server, "/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    parts = {"content": [{"type": "text", "text": DOCUMENTS[2]}]}
    documents = [{"text": DOCUMENTS[0]}, {"content": DOCUMENTS[1]}, parts]
    objects = post(server, "/rerank", {"query": {"text": QUERY}, "documents": documents}).json()["results"]
    for a, b in zip(plain, objects, strict=True):
        assert a["index"] == b["index"]
        assert a["relevance_score"] == pytest.approx(b["relevance_score"], abs=1e-4)
    records = [{"title": "a", "body": "b", "year": 1}, {"title": "c"}]
    body = {"query": QUERY, "documents": records, "rank_fields": ["title", "year"]}
    texts = [result["document"]["text"] for result in post(server, "/rerank", body).json()["results"]]
    assert sorted(texts) == ["title: a\nyear: 1", "title: c"]
    body["rank_fields"] = ["title", "year", "title"] * 1000
    texts = [result["document"]["text"] for result in post(server, "/rerank", body).json()["results"]]
    assert sorted(texts) == ["title: a\nyear: 1", "title: c"], "a field that is named again counts once"


def test_documents_are_left_out_of_the_answer_on_request(server: Server) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "return_documents": False}
    assert all("document" not in result for result in post(server, "/rerank", body).json()["results"])


def test_rerank_with_texts_answers_as_tei_does(server: Server) -> None:
    answer = post(server, "/rerank", {"query": QUERY, "texts": DOCUMENTS, "return_text": True}).json()
    assert [set(item) for item in answer] == [{"index", "score", "text"}] * 3
    assert answer[0]["index"] == 1
    bare = post(server, "/rerank", {"query": QUERY, "texts": DOCUMENTS}).json()
    assert [set(item) for item in bare] == [{"index", "score"}] * 3


def test_rerank_cuts_long_documents_and_says_so(server: Server) -> None:
    answer = post(server, "/rerank", {"query": QUERY, "documents": ["word " * 2000, "short"]}).json()
    assert len(answer["results"]) == 2
    assert answer["warnings"][0].startswith("1 input was longer than the model reads and cut")
    refused = post(
        server, "/rerank", {"query": QUERY, "documents": ["word " * 2000], "long_documents": "error"}
    )
    assert refused.status_code == 400
    assert "2002 tokens, but at most 256" in refused.json()["error"]["message"]


def test_score_cuts_long_documents_too(server: Server) -> None:
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


def test_a_cross_encoder_gives_probabilities_or_logits(cross_encoder_server: Server) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS}
    activated = post(cross_encoder_server, "/rerank", body).json()
    assert activated["model"] == "reranker"
    raw = post(cross_encoder_server, "/rerank", body | {"raw_scores": True}).json()
    logits = post(cross_encoder_server, "/rerank", body | {"use_activation": False}).json()
    assert [r["relevance_score"] for r in raw["results"]] == [r["relevance_score"] for r in logits["results"]]
    assert all(0 < result["relevance_score"] < 1 for result in activated["results"])
    assert raw["results"][0]["relevance_score"] != activated["results"][0]["relevance_score"]


def test_the_server_scores_as_the_engine_does(server: Server, pairs: list[Pair]) -> None:
    documents = [pair.document for pair in pairs]

    async def score() -> list[float]:
        async with Engine(EngineConfig(dtype="float32")) as engine:
            return (await engine.score(pairs[0].query, documents, truncation=CUT_LONG)).scores

    body = {"queries": pairs[0].query, "documents": documents, "truncate_prompt_tokens": -1}
    answer = post(server, "/score", body).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx(asyncio.run(score()), abs=1e-3)
