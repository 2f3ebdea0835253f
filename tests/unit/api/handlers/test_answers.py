"""Answers of the routes: every field beside the engine's own results, in every shape that clients know."""

import asyncio
import base64
import itertools
import json
import platform
import time
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray

import maxsimd
from maxsimd.engine import Engine, Muvera, RequestTooLargeError, RerankResult, Tenant
from maxsimd.engine.processors.embedding import EmbeddingPlan
from maxsimd.engine.workers import yield_to_smaller
from tests.nearly import nearly
from tests.unit.calling_handlers import Caller, RecordingEngine

QUERY = "What is the capital of France?"
DOCUMENTS = ["Berlin is in Germany.", "Paris is the capital of France.", "Cats purr."]
RERANKS = ["/rerank", "/v1/rerank", "/v2/rerank"]


@pytest_asyncio.fixture(loop_scope="session")
async def caller(engine: RecordingEngine) -> Caller:
    await engine.clear_cache()
    return Caller(engine, served_model_name=("mine",))


def _check_head(answer: Any, prefix: str) -> None:
    name, _, number = answer["id"].partition("-")
    assert (name, len(number), answer["model"]) == (prefix, 32, "mine")
    if prefix != "rerank":
        assert answer["object"] == "list"
        assert isinstance(answer["created"], int)
        assert abs(answer["created"] - time.time()) < 600


async def test_scores_are_the_engines_in_input_order(caller: Caller) -> None:
    for path in ("/score", "/v1/score"):
        expected = (await caller.engine.score(QUERY, DOCUMENTS)).scores
        answer = await caller.json(path, {"queries": QUERY, "documents": DOCUMENTS})
        assert set(answer) == {"id", "object", "created", "model", "data", "usage", "score_scale"}
        _check_head(answer, "score")
        assert (await caller.json(path, {"queries": QUERY, "documents": DOCUMENTS}))["id"] != answer["id"]
        items = [{"index": i, "object": "score", "score": score} for i, score in enumerate(expected)]
        assert (answer["data"], max(expected)) == (nearly(items), expected[1])


async def test_documents_are_ranked_best_first(caller: Caller) -> None:
    expected = (await caller.engine.score(QUERY, DOCUMENTS)).scores
    order = sorted(range(3), key=lambda i: -expected[i])
    for path, value in itertools.product(RERANKS, (None, True, False)):
        body = {"query": QUERY, "documents": DOCUMENTS, "return_documents": value, "top_n": 0}
        answer = await caller.json(path, body)
        assert set(answer) == {"id", "model", "results", "usage", "meta", "score_scale"}
        _check_head(answer, "rerank")
        tokens = {"input_tokens": answer["usage"]["prompt_tokens"]}
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": tokens}
        assert answer["meta"] == meta
        for i, item in zip(order, answer["results"], strict=True):
            text = {} if value is False else {"document": {"text": DOCUMENTS[i]}}
            assert item == nearly({"index": i, "relevance_score": expected[i]}) | text
        bare = await caller.json(path, {"query": QUERY, "texts": DOCUMENTS, "return_text": value})
        for i, item in zip(order, bare, strict=True):
            text = {"text": DOCUMENTS[i]} if value else {}
            assert item == nearly({"index": i, "score": expected[i]}) | text
    for path, top_n in itertools.product(RERANKS, (2, 4)):
        best = order[:top_n]
        answer = await caller.json(path, {"query": QUERY, "documents": DOCUMENTS, "top_n": top_n})
        assert [item["index"] for item in answer["results"]] == best
        bare = await caller.json(path, {"query": QUERY, "texts": DOCUMENTS, "top_n": top_n})
        assert [item["index"] for item in bare] == best


async def test_usage_counts_tokens_and_those_in_the_cache(caller: Caller) -> None:
    # [CLS] hello [SEP], and two documents of 3 and of 4 tokens.
    score = {"queries": "hello", "documents": ["world", "two words"]}
    assert (await caller.json("/score", score))["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    rerank = {"query": "hello", "documents": ["world", "two words", "of all three"]}
    details = {"cached_tokens": 7, "cached_documents": 2}
    usage = (await caller.json("/rerank", rerank))["usage"]
    assert usage == {"prompt_tokens": 15, "total_tokens": 15, "prompt_tokens_details": details}
    assert (await caller.json("/score", score))["usage"]["prompt_tokens_details"] == details
    for path in ("/v1/embeddings", "/pooling"):
        answer = await caller.json(path, {"input": ["hello", "two words"]})
        assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    emptied = await caller.ask("DELETE", "/cache")
    assert (emptied.status, emptied.body) == (204, b"")
    assert "Content-Type" not in emptied.headers
    assert "prompt_tokens_details" not in (await caller.json("/rerank", rerank))["usage"]


def _multimodal(text: str) -> Any:
    return {"inputs": [{"content": [{"type": "text", "text": text}]}]}


async def test_inputs_above_a_length_are_cut_or_a_400(caller: Caller) -> None:
    refuse = {"long_documents": "error"}
    for path, body, strict in (
        ("/score", lambda text: {"queries": "q", "documents": ["d", text]}, refuse),
        ("/v1/embeddings", lambda text: {"input": text}, refuse),
        ("/v2/embed", lambda text: {"texts": [text]}, {"truncate": "NONE"}),
        ("/rerank", lambda text: {"query": "q", "texts": [text]}, {"truncate": False}),
        ("/embed", lambda text: {"inputs": text}, {"truncate": False}),
        ("/embed_all", lambda text: {"inputs": text}, {"truncate": False}),
        ("/api/embed", lambda text: {"input": text}, {"truncate": False}),
        ("/v1/multimodalembeddings", _multimodal, {"truncation": False}),
        ("/v1/ranking", lambda text: {"query": "q", "passages": [{"text": text}]}, refuse),
    ):
        fits, long = body("word " * 254), body("word " * 255)
        fitting = await caller.post(path, fits | strict)
        assert (fitting.status, "x-maxsimd-warnings" in fitting.headers) == (200, False), fitting.headers
        cut = await caller.post(path, long)
        assert cut.status == 200
        assert cut.headers["x-maxsimd-warnings"].startswith("1 input was longer than the model reads")
        answer = json.loads(cut.body)
        if isinstance(answer, dict):
            assert answer["warnings"] == [cut.headers["x-maxsimd-warnings"]]
        error = await caller.refused(path, long | strict, 400, says="257 tokens, but at most 256 can be run")
        (name,) = strict
        assert f"refuse them with {name} " in cut.headers["x-maxsimd-warnings"]
        assert f"let it be truncated ({name} " in error["message"]
        assert error["param"] in long
        assert error["message"].startswith(error["param"])
    for path, body, name, value, cut_field in (
        ("/rerank", {"query": "q", "documents": ["two words"]}, "max_tokens_per_doc", 1, "documents"),
        ("/score", {"queries": "two words", "documents": ["d"]}, "max_tokens_per_query", 1, "queries"),
        ("/v1/embeddings", {"input": "two words"}, "truncate_prompt_tokens", 3, "input"),
    ):
        cut = await caller.json(path, body | {name: value})
        assert f"1 input was longer than this request's {name} ({value})," in cut["warnings"][0]
        await caller.refused(path, body | {name: value, "long_documents": "error"}, 400, cut_field)
        assert "warnings" not in await caller.json(path, body | {name: value + 1, "long_documents": "error"})


async def test_vectors_are_the_engines(caller: Caller) -> None:
    expected = (await caller.engine.embed(["hello", "two words"])).embeddings
    for path, name, kind, prefix, change in (
        ("/v1/embeddings", "embedding", "embedding", "embd", {}),
        ("/pooling", "data", "pooling", "pooling", {"task": "embed"}),
    ):
        answer = await caller.json(path, {"input": ["hello", "two words"]} | change)
        assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
        _check_head(answer, prefix)
        np.testing.assert_allclose([item.pop(name) for item in answer["data"]], expected, atol=1e-5)
        assert answer["data"] == [{"index": i, "object": kind} for i in range(2)]
        short = await caller.json(path, {"input": "hello", "dimensions": 2} | change)
        cut = expected[0, :2] / np.linalg.norm(expected[0, :2])
        np.testing.assert_allclose(short["data"][0][name], cut, atol=1e-5)
    expected = (await caller.engine.embed_tokens(["hello", "two words"])).embeddings
    for more in ({}, {"task": "token_embed"}, {"encoding_format": "base64"}):
        answer = await caller.json("/pooling", {"input": ["hello", "two words"]} | more)
        for item, matrix in zip(answer["data"], expected, strict=True):
            found = item["data"]
            if "encoding_format" in more:
                found = np.frombuffer(base64.b64decode(found), "<f4").reshape(matrix.shape)
            np.testing.assert_allclose(found, matrix, atol=1e-5)
    assert [matrix.shape for matrix in expected] == [(3, 384), (4, 384)]


async def test_vectors_that_an_answer_has_no_room_for_are_refused(engine: RecordingEngine) -> None:
    """With 384 dimensions a mebibyte has room for 113 vectors, with 64 for 682."""
    caller = Caller(engine, max_bodies_mb=1)
    body = {"input": ["a " * 54] * 2, "task": "token_embed"}  # of 56 tokens each
    assert len((await caller.json("/pooling", body))["data"]) == 2
    body["input"] = ["a " * 55] * 2
    shown = "these texts have 114 tokens, a vector each, and an answer has room for 113 of them"
    await caller.refused("/pooling", body, 413, says=shown)
    assert len((await caller.json("/pooling", body | {"dimensions": 64}))["data"]) == 2
    texts, shown = ["a"] * 114, "114 vectors of 384 numbers would be made, and there is room for 113"
    for path, asked in (
        ("/v1/embeddings", {"input": texts}),
        ("/embed", {"inputs": texts}),
        ("/v2/embed", {"model": "all-MiniLM-L6-v2", "texts": texts, "input_type": "search_document"}),
    ):
        await caller.refused(path, asked, 413, says=shown)
    assert len((await caller.json("/v1/embeddings", {"input": texts, "dimensions": 64}))["data"]) == 114
    body = ENCODED | {"muvera": SMALL}
    await caller.json("/v1/embeddings", body)
    await caller.refused("/v1/embeddings", {**body, "input": ["a"] * 500}, 413, says="room for 455")
    # However short it becomes in the end.
    body["muvera"] = SMALL | {"k_sim": SMALL["k_sim"] + 3, "d_final": 8}
    await caller.refused("/v1/embeddings", {**body, "input": ["a"] * 60}, 413, says="room for 56")
    caller = Caller(engine, max_documents=2)
    chunks = {"input": "a b c", "late_chunking": True, "chunks": [[0, 1], [2, 3], [4, 5]]}
    assert (await caller.error("/v1/embeddings", chunks))[0] == 413


async def test_what_the_model_cannot_do_is_refused(caller: Caller) -> None:
    for path, body in (
        ("/classify", {"input": "a"}),
        ("/predict", {"inputs": ["a", "b"]}),
        ("/pooling", {"input": "a", "task": "classify"}),
    ):
        await caller.refused(path, body, 400, "task", "cannot classify; it can embed and token_embed")
    for task in (None, "token_embed", "embed"):
        body = {"input": "a", "task": task}
        await caller.refused("/pooling", body | {"use_activation": False}, 400, "use_activation")
        await caller.json("/pooling", body | {"use_activation": True})
    messages = [{"role": "user", "content": "a"}]
    await caller.refused("/v1/embeddings", {"messages": messages}, 400, says="no chat template")


async def test_the_model_card_and_metrics_say_what_runs(caller: Caller) -> None:
    listed = json.loads((await caller.ask("GET", "/v1/models")).body)
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert abs(card.pop("created") - time.time()) < 600
    assert card.pop("checked") == [str(finding) for finding in caller.engine.device_model.findings]
    named = {"id": "mine", "object": "model", "owned_by": "maxsimd", "root": "all-MiniLM-L6-v2"}
    runs = {"execution": "packed", "device": "cpu", "kernels": caller.engine.facts.kernels, "state": "ok"}
    assert card == named | runs | {
        "max_model_len": 256,
        "score_type": "late-interaction",
        "score_scale": {"transform": "maxsim", "min": None, "max": None},
        "normalized_score_scale": {"transform": "clipped meanmaxsim", "min": 0.0, "max": 1.0},
    }
    await caller.json("/score", {"queries": "q", "documents": "d"})
    answer = await caller.ask("GET", "/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=1.0.0; charset=utf-8"
    for line in (
        'maxsimd_http_requests_total{route="/score",status="200"} 1.0',
        "maxsimd_request_documents_count 1.0",
        "process_resident_memory_bytes",
        "maxsimd_ready 1.0",
        f'maxsimd_build_info{{python="{platform.python_version()}",torch="{torch.__version__}",transformers="5.',
        "maxsimd_http_in_flight 1.0",  # this request itself
    ):
        assert line in answer.body.decode()
    assert json.loads((await caller.ask("GET", "/version")).body) == {"version": maxsimd.__version__}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranked(engine: RecordingEngine) -> RerankResult:
    return await engine.rerank(QUERY, DOCUMENTS)


async def test_voyages_and_mixedbreads_shapes(caller: Caller, ranked: RerankResult) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "model": None, "top_k": 2, "truncation": True}
    answer = await caller.json("/v1/rerank", body)
    best = [{"index": one.index, "relevance_score": one.score} for one in ranked.results[:2]]
    usage = answer["usage"] | {"total_tokens": ranked.usage.prompt_tokens}
    named = {"object": "list", "model": caller.state.model_name}
    assert answer == nearly(named | {"data": best, "usage": usage})
    answer = await caller.json("/v1/rerank", body | {"return_documents": True})
    assert [item["document"] for item in answer["data"]] == [one.document for one in ranked.results[:2]]
    body = {"query": QUERY, "input": DOCUMENTS, "top_k": 2, "return_input": True}
    answer = await caller.json("/v1/reranking", body)
    best = [{"index": one.index, "score": one.score, "input": one.document} for one in ranked.results[:2]]
    assert answer["data"] == nearly([one | {"object": "rank_result"} for one in best])
    assert (answer["object"], answer["top_k"], answer["return_input"]) == ("list", 2, True)
    del body["return_input"]
    assert [item["input"] for item in (await caller.json("/v1/reranking", body))["data"]] == [None, None]
    record = {"query": QUERY, "input": [{"title": DOCUMENTS[1], "x": "y"}], "rank_fields": ["title"]}
    expected = await caller.engine.score(QUERY, f"title: {DOCUMENTS[1]}")
    assert (await caller.json("/v1/reranking", record))["data"][0]["score"] == nearly(expected.scores[0])


async def test_nvidias_and_deepinfras_shapes(caller: Caller, ranked: RerankResult) -> None:
    passages = [{"text": document} for document in DOCUMENTS]
    answer = await caller.json("/v1/ranking", {"query": {"text": QUERY}, "passages": passages})
    assert answer["rankings"] == nearly([{"index": one.index, "logit": one.score} for one in ranked.results])
    assert answer["usage"]["prompt_tokens"] == ranked.usage.prompt_tokens
    path, body = "/v1/inference/all-MiniLM-L6-v2", {"queries": [QUERY] * 3, "documents": DOCUMENTS}
    answer = await caller.json(path, body)
    expected = {one.index: one.score for one in ranked.results}
    assert answer["scores"] == nearly([expected[i] for i in range(3)])
    status = answer["inference_status"]
    assert (status["status"], status["tokens_input"]) == ("succeeded", answer["input_tokens"])
    await caller.refused(path, body | {"score_threshold": 0.5}, 400, "score_threshold")


async def test_llama_cpps_and_infinitys_shapes(caller: Caller, ranked: RerankResult) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    best = [{"index": one.index, "relevance_score": one.score} for one in ranked.results[:2]]
    for path in ("/reranking", "/v1/reranking"):
        answer = await caller.json(path, body)
        named = {"object": "list", "model": caller.state.model_name}
        assert answer == nearly(named | {"usage": answer["usage"], "results": best})
    answer = await caller.json("/reranking", body | {"return_documents": True})
    assert [one["document"]["text"] for one in answer["results"]] == [one.text for one in ranked.results[:2]]
    answer = await caller.json("/reranking", {"query": QUERY, "texts": DOCUMENTS, "top_n": 1})
    assert answer == nearly([{"index": best[0]["index"], "score": best[0]["relevance_score"]}])
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    answer = await caller.json("/infinity/rerank", body)
    shown = [{"document": one.document} for one in ranked.results[:2]]
    assert answer["results"] == nearly([one | two for one, two in zip(best, shown, strict=True)])
    assert (answer["object"], answer["usage"]["total_tokens"]) == ("rerank", ranked.usage.prompt_tokens)
    del body["return_documents"]
    assert [one["document"] for one in (await caller.json("/infinity/rerank", body))["results"]] == [None] * 2
    (card,) = json.loads((await caller.ask("GET", "/infinity/models")).body)["data"]
    assert (card["owned_by"], card["stats"]) == ("infinity", {"queue_absolute": 0, "results_pending": 0})


async def test_what_has_no_place_in_a_shape_is_refused(caller: Caller) -> None:
    for path, body in (
        ("/rerank", {"texts": DOCUMENTS}), ("/infinity/rerank", {"documents": DOCUMENTS}),
        ("/rerank", {"documents": DOCUMENTS, "top_k": 1}), ("/v1/reranking", {"input": DOCUMENTS}),
        ("/reranking", {"documents": DOCUMENTS}),
        ("/v1/inference/all-MiniLM-L6-v2", {"queries": QUERY, "documents": DOCUMENTS}),
        ("/v1/ranking", {"passages": DOCUMENTS}),
    ):  # fmt: skip
        options = {"stream": True, "explain": True, "on_timeout": "partial", "on_error": "report"}
        for name, value in options.items():
            await caller.refused(path, {"query": QUERY, name: value} | body, 400, name)


async def test_errors_are_in_the_words_of_the_request(caller: Caller) -> None:
    for path, body, name, message in (
        ("/score", {"queries": [], "documents": "d"}, "queries", "queries is empty; give at least one text"),
        ("/score", {"text_1": ["q", "r"], "text_2": ["b"] * 3}, "text_2", "there are 2 queries and 3"),
        ("/rerank", {"query": QUERY, "texts": []}, "texts", "texts is empty"),
        ("/v1/reranking", {"query": QUERY, "input": []}, "input", "input is empty"),
        ("/v1/ranking", {"query": QUERY, "passages": []}, "passages", "passages is empty"),
        ("/v2/embed", {"inputs": []}, "inputs", "inputs is empty"),
        ("/rerank", {"query": QUERY, "documents": "d", "instruct": "a", "instruction": "b"}, "instruct", ""),
        ("/rerank", {"query": QUERY, "documents": "d", "instruct": "a"}, "instruct", "no instruction"),
        ("/v2/embed", {"texts": ["d"], "output_dimension": 999}, "output_dimension", "output_dimension must"),
        ("/v1/embeddings", ENCODED | {"input_type": None}, "input_type", ""),
        ("/v1/embeddings", ENCODED | {"output_dimension": 8}, "output_dimension", ""),
        ("/v1/embeddings", ENCODED | {"late_chunking": True}, "late_chunking", ""),
        ("/v1/embeddings", ENCODED | {"muvera": {"d_proj": 385}}, "muvera", ""),
        ("/v1/embeddings", ENCODED | {"muvera": {"k_sim": 13}}, "muvera", ""),
        ("/v1/embeddings", ENCODED | {"encoding": None, "muvera": {"k_sim": 3}}, "muvera", ""),
        ("/v1/multi-vector", ENCODED, "encoding", ""),
        ("/pooling", ENCODED | {"task": "token_embed"}, "encoding", ""),
        ("/v1/embeddings", CHUNKED | {"input": ["a", " "]}, "input", ""),
        ("/v1/embeddings", CHUNKED | {"input": "word " * 300}, "input", ""),
        ("/v1/embeddings", CHUNKED | {"truncate_prompt_tokens": 10}, "truncate_prompt_tokens", ""),
        ("/v1/multi-vector", CHUNKED, "late_chunking", ""),
        ("/pooling", CHUNKED | {"task": "token_embed"}, "late_chunking", ""),
    ):
        await caller.refused(path, body, 400, name, message)


async def test_scores_below_a_threshold_are_left_out(caller: Caller, ranked: RerankResult) -> None:
    best, second = ranked.results[0], ranked.results[1]
    for threshold, count in ((best.score, 1), (second.score, 2), (best.score + 1, 0), (-1e3, 3)):
        body = {"queries": QUERY, "documents": DOCUMENTS, "score_threshold": threshold}
        data = (await caller.json("/score", body))["data"]
        assert {item["index"] for item in data} == {one.index for one in ranked.results[:count]}


async def test_the_server_may_normalize_by_default(engine: RecordingEngine) -> None:
    caller = Caller(engine, normalize_scores=True)
    body = {"query": QUERY, "documents": DOCUMENTS}
    for change, normalizes in (({}, True), ({"normalize": False}, False), ({"raw_scores": True}, False)):
        await caller.json("/rerank", body | change)
        assert engine.calls[-1][2]["normalize"] is normalizes
    await caller.refused("/rerank", body | {"normalize": True, "raw_scores": True}, 400, "normalize")


async def test_an_answer_in_another_shape_says_where_the_time_went(caller: Caller) -> None:
    answer = await caller.post("/rerank", {"query": QUERY, "texts": DOCUMENTS})
    assert answer.headers["x-compute-type"] == "cpu"
    assert answer.headers["x-compute-characters"] == str(len(QUERY) + sum(map(len, DOCUMENTS)))
    for name in ("compute-time", "total-time", "tokenization-time", "queue-time", "inference-time"):
        assert int(answer.headers[f"x-{name}"]) >= 0
    assert int(answer.headers["x-compute-tokens"]) > 20
    assert "model;dur=" in answer.headers["server-timing"]


TEXTS = ["Berlin is the capital of Germany.", "It lies on the Spree.", "a", "Paris is the capital of France."]
SMALL: dict[str, Any] = {"k_sim": 2, "r_reps": 3, "d_proj": 8}
ENCODED: dict[str, Any] = {"input": TEXTS, "encoding": "muvera", "input_type": "document"}
CHUNKED: dict[str, Any] = {"input": "ab", "late_chunking": True}


def vectors_of(answer: Any) -> NDArray[Any]:
    return np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)


async def test_one_vector_is_made_of_the_token_vectors(caller: Caller) -> None:
    for input_type in ("query", "document"):
        answer = await caller.json("/v1/embeddings", ENCODED | {"input_type": input_type})
        tokens = await caller.engine.embed_tokens(TEXTS, input_type=input_type)
        expected = Muvera().encode(tokens.embeddings, input_type)
        np.testing.assert_allclose(vectors_of(answer), expected, atol=1e-6)
        assert answer["usage"]["prompt_tokens"] == tokens.usage.prompt_tokens
        shown = {"name": "muvera", "k_sim": 3, "r_reps": 40, "d_proj": 32, "d_final": None}
        assert answer["encoding"] == shown | {"full_length": True, "seed": 0}
    first = await caller.json("/v1/embeddings", {**ENCODED, "muvera": {**SMALL, "d_final": 20, "seed": 5}})
    again = await caller.json("/v1/embeddings", {**ENCODED, "muvera": first["encoding"]})
    assert vectors_of(first).shape == (4, 20)
    np.testing.assert_array_equal(vectors_of(first), vectors_of(again))
    unprojected = await caller.json("/v1/embeddings", {**ENCODED, "muvera": {**SMALL, "d_proj": 0}})
    assert (vectors_of(unprojected).shape, unprojected["encoding"]["d_proj"]) == ((4, 4 * 3 * 384), 0)
    whole = await caller.post("/v1/embeddings", ENCODED | {"muvera": SMALL, "encoding_format": "safetensors"})
    length = int.from_bytes(whole.body[:8], "little")
    about = json.loads(json.loads(whole.body[8 : 8 + length])["__metadata__"]["encoding"])
    assert (about["k_sim"], about["d_final"]) == (2, None)


async def test_vectors_end_at_the_timeout(engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[float] = []

    def slow(*arguments: object) -> None:
        begun = time.monotonic()
        try:
            while time.monotonic() < begun + 100:
                time.sleep(0.01)
                yield_to_smaller()
        finally:
            ended.append(time.monotonic() - begun)

    monkeypatch.setattr(EmbeddingPlan, "encoded", slow)
    body = {"input": "a", "encoding": "muvera", "input_type": "query", "timeout": 3}
    assert (await Caller(engine).ask("POST", "/v1/embeddings", body)).status == 504
    while not ended:
        await asyncio.sleep(0.01)
    assert ended[0] < 50


async def test_long_vectors_have_a_price(engine: RecordingEngine) -> None:
    texts, long = ["a"] * 40, Muvera(k_sim=12, r_reps=64, d_proj=1)
    engine.set_tenants({"": Tenant(max_request_tokens=5000)})
    try:
        with pytest.raises(RequestTooLargeError, match="tokens, more than the 5000"):
            await engine.embed(texts, input_type="document", encoding=long)
        assert len((await engine.embed(texts, input_type="document", encoding="muvera")).embeddings) == 40
    finally:
        engine.set_tenants({})


async def test_cached_token_vectors_give_the_same_vectors() -> None:
    options: dict[str, Any] = {"encoding": Muvera(**SMALL)}
    async with Engine(dtype="float32", threads=1, cache_precision="float32") as engine:
        run = await engine.embed(TEXTS, input_type="document", **options)
        assert run.usage.cached_documents == 0
        await engine.score("what is it", TEXTS[1:])
        cached = await engine.embed(TEXTS, input_type="document", **options)
        np.testing.assert_allclose(cached.embeddings, run.embeddings, atol=1e-5)
        assert (cached.usage.cached_documents, cached.usage.prompt_tokens) == (3, run.usage.prompt_tokens)
        all_cached = await engine.embed(TEXTS[1:], input_type="document", **options)
        assert all_cached.usage.cached_tokens == all_cached.usage.prompt_tokens
        np.testing.assert_array_equal(all_cached.embeddings, cached.embeddings[1:])
        # A document that was cached through windows is not reused.
        long = "word " * 400
        whole = await engine.embed([long], truncation="window", input_type="document", **options)
        await engine.score("what is it", [long], truncation="window")
        again = await engine.embed([long], truncation="window", input_type="document", **options)
        np.testing.assert_allclose(again.embeddings, whole.embeddings, atol=1e-5)
        assert (await engine.embed(TEXTS[1:], input_type="query", **options)).usage.cached_documents == 0


CHUNKS = ["Berlin is the capital of Germany. ", "It lies on the Spree", " and has many lakes."]


async def test_chunks_come_as_texts_or_by_their_characters(caller: Caller) -> None:
    ends = np.cumsum([len(chunk) for chunk in CHUNKS]).tolist()
    spans = [*zip([0, *ends], ends, strict=False)]
    by_text = await caller.json("/v1/embeddings", {"input": CHUNKS, "late_chunking": True})
    document = {"input": "".join(CHUNKS)}
    by_character = await caller.json("/v1/embeddings", {**document, "late_chunking": True, "chunks": spans})
    whole = await caller.json("/v1/embeddings", document)
    alone = await caller.json("/v1/embeddings", {"input": CHUNKS, "late_chunking": False})
    vectors = [np.array([item["embedding"] for item in answer["data"]]) for answer in (by_text, by_character)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    assert ([item["index"] for item in by_text["data"]], by_text["usage"]) == ([0, 1, 2], whole["usage"])
    assert np.abs(vectors[0] - [item["embedding"] for item in alone["data"]]).max() > 0.01
    short = await caller.json("/v1/embeddings", {"input": CHUNKS, "late_chunking": True, "dimensions": 8})
    cut = vectors[0][:, :8]
    expected = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose([item["embedding"] for item in short["data"]], expected, atol=1e-6)
