"""Reranking as each client knows it: the same ranking in every shape."""

import json

import pytest_asyncio

from maxsimd.engine import RerankResult
from tests.nearly import nearly
from tests.unit.calling_handlers import Caller, RecordingEngine

QUERY = "the capital of France"
DOCUMENTS = ["Berlin is in Germany.", "Paris is the capital of France.", "Cats sleep a lot."]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranked(engine: RecordingEngine) -> RerankResult:
    return await engine.rerank(QUERY, DOCUMENTS)


async def test_voyages_shape(caller: Caller, ranked: RerankResult) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "model": None, "top_k": 2, "truncation": True}
    answer = await caller.json("/v1/rerank", body)
    assert answer == nearly(
        {
            "object": "list",
            "data": [{"index": one.index, "relevance_score": one.score} for one in ranked.results[:2]],
            "model": caller.state.model_name,
            "usage": answer["usage"] | {"total_tokens": ranked.usage.prompt_tokens},
        }
    )
    answer = await caller.json("/v1/rerank", body | {"return_documents": True})
    assert [item["document"] for item in answer["data"]] == [one.document for one in ranked.results[:2]]


async def test_mixedbreads_shape(caller: Caller, ranked: RerankResult) -> None:
    body = {"query": QUERY, "input": DOCUMENTS, "top_k": 2, "return_input": True}
    answer = await caller.json("/v1/reranking", body)
    assert answer["data"] == nearly(
        [
            {"index": one.index, "score": one.score, "input": one.document, "object": "rank_result"}
            for one in ranked.results[:2]
        ]
    )
    assert (answer["object"], answer["top_k"], answer["return_input"]) == ("list", 2, True)
    del body["return_input"]
    assert [item["input"] for item in (await caller.json("/v1/reranking", body))["data"]] == [None, None]
    record = {"query": QUERY, "input": [{"title": DOCUMENTS[1], "x": "y"}], "rank_fields": ["title"]}
    expected = await caller.engine.score(QUERY, f"title: {DOCUMENTS[1]}")
    assert (await caller.json("/v1/reranking", record))["data"][0]["score"] == nearly(expected.scores[0])


async def test_nvidias_shape(caller: Caller, ranked: RerankResult) -> None:
    passages = [{"text": document} for document in DOCUMENTS]
    answer = await caller.json("/v1/ranking", {"query": {"text": QUERY}, "passages": passages})
    assert answer["rankings"] == nearly([{"index": one.index, "logit": one.score} for one in ranked.results])
    assert answer["usage"]["prompt_tokens"] == ranked.usage.prompt_tokens


async def test_llama_cpps_shape(caller: Caller, ranked: RerankResult) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    best = [{"index": one.index, "relevance_score": one.score} for one in ranked.results[:2]]
    for path in ("/reranking", "/v1/reranking"):
        answer = await caller.json(path, body)
        assert answer == nearly(
            {"model": caller.state.model_name, "object": "list", "usage": answer["usage"], "results": best}
        )
    answer = await caller.json("/reranking", body | {"return_documents": True})
    assert [one["document"]["text"] for one in answer["results"]] == [one.text for one in ranked.results[:2]]
    answer = await caller.json("/reranking", {"query": QUERY, "texts": DOCUMENTS, "top_n": 1})
    assert answer == nearly([{"index": best[0]["index"], "score": best[0]["relevance_score"]}])


async def test_deepinfras_shape(caller: Caller, ranked: RerankResult) -> None:
    body = {"queries": [QUERY] * 3, "documents": DOCUMENTS}
    answer = await caller.json("/v1/inference/all-MiniLM-L6-v2", body)
    expected = {one.index: one.score for one in ranked.results}
    assert answer["scores"] == nearly([expected[i] for i in range(3)])
    status = answer["inference_status"]
    assert (status["status"], status["tokens_input"]) == ("succeeded", answer["input_tokens"])
    status, error = await caller.error("/v1/inference/all-MiniLM-L6-v2", body | {"score_threshold": 0.5})
    assert (status, error["param"]) == (400, "score_threshold")


async def test_infinitys_shape(caller: Caller, ranked: RerankResult) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    answer = await caller.json("/infinity/rerank", body)
    assert answer["results"] == nearly(
        [
            {"relevance_score": one.score, "index": one.index, "document": one.document}
            for one in ranked.results[:2]
        ]
    )
    assert answer["object"] == "rerank"
    assert answer["usage"]["total_tokens"] == ranked.usage.prompt_tokens
    del body["return_documents"]
    assert [one["document"] for one in (await caller.json("/infinity/rerank", body))["results"]] == [None] * 2
    answer = await caller.ask("GET", "/infinity/models")
    (card,) = json.loads(answer.body)["data"]
    assert (card["owned_by"], card["stats"]) == ("infinity", {"queue_absolute": 0, "results_pending": 0})


async def test_what_has_no_place_in_a_shape_is_refused(caller: Caller) -> None:
    for path, body in (
        ("/rerank", {"texts": DOCUMENTS}),
        ("/infinity/rerank", {"documents": DOCUMENTS}),
        ("/rerank", {"documents": DOCUMENTS, "top_k": 1}),
        ("/v1/reranking", {"input": DOCUMENTS}),
        ("/reranking", {"documents": DOCUMENTS}),
        ("/v1/inference/all-MiniLM-L6-v2", {"queries": QUERY, "documents": DOCUMENTS}),
        ("/v1/ranking", {"passages": DOCUMENTS}),
    ):
        options = {"stream": True, "explain": True, "on_timeout": "partial", "on_error": "report"}
        for name, value in options.items():
            status, error = await caller.error(path, {"query": QUERY, name: value} | body)
            assert (status, error["param"]) == (400, name), path


async def test_errors_are_in_the_words_of_the_request(caller: Caller) -> None:
    for path, body, name, message in (
        ("/score", {"queries": [], "documents": "d"}, "queries", "queries is empty; give at least one text"),
        ("/score", {"text_1": ["q", "r"], "text_2": ["b"] * 3}, "text_2", "there are 2 queries and 3"),
        ("/rerank", {"query": QUERY, "texts": []}, "texts", "texts is empty"),
        ("/v1/reranking", {"query": QUERY, "input": []}, "input", "input is empty"),
        ("/v1/ranking", {"query": QUERY, "passages": []}, "passages", "passages is empty"),
    ):
        status, error = await caller.error(path, body)
        assert (status, error["param"]) == (400, name)
        assert message in error["message"]


async def test_scores_below_a_threshold_are_left_out(caller: Caller, ranked: RerankResult) -> None:
    best, second = ranked.results[0], ranked.results[1]
    for threshold, count in ((best.score, 1), (second.score, 2), (best.score + 1, 0), (-1e3, 3)):
        body = {"queries": QUERY, "documents": DOCUMENTS, "score_threshold": threshold}
        data = (await caller.json("/score", body))["data"]
        assert {item["index"] for item in data} == {one.index for one in ranked.results[:count]}


async def test_the_server_may_normalize_by_default(engine: RecordingEngine) -> None:
    """The server normalizes if the request does not say; `test_fields.py` has requests that do."""
    caller = Caller(engine, normalize_scores=True)
    body = {"query": QUERY, "documents": DOCUMENTS}
    for change, normalizes in (({}, True), ({"normalize": False}, False), ({"raw_scores": True}, False)):
        await caller.json("/rerank", body | change)
        assert engine.calls[-1][2]["normalize"] is normalizes
    status, error = await caller.error("/rerank", body | {"normalize": True, "raw_scores": True})
    assert (status, error["param"]) == (400, "normalize")


async def test_an_answer_in_another_shape_says_where_the_time_went(caller: Caller) -> None:
    answer = await caller.post("/rerank", {"query": QUERY, "texts": DOCUMENTS})
    assert answer.headers["x-compute-type"] == "cpu"
    assert answer.headers["x-compute-characters"] == str(len(QUERY) + sum(map(len, DOCUMENTS)))
    for name in ("compute-time", "total-time", "tokenization-time", "queue-time", "inference-time"):
        assert int(answer.headers[f"x-{name}"]) >= 0
    assert int(answer.headers["x-compute-tokens"]) > 20
    assert "model;dur=" in answer.headers["server-timing"]
