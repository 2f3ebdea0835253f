"""What the routes answer: every field of every answer, beside the engine's own results."""

import base64
import json
import platform
import time
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

import maxsimd
from tests.unit.calling_handlers import Caller, RecordingEngine

QUERY = "What is the capital of France?"
DOCUMENTS = ["Berlin is in Germany.", "Paris is the capital of France.", "Cats purr."]
RERANKS = ["/rerank", "/v1/rerank", "/v2/rerank"]


@pytest_asyncio.fixture(loop_scope="session")
async def caller(engine: RecordingEngine) -> Caller:
    """Of a server whose cache is empty and whose model has another name."""
    await engine.clear_cache()
    return Caller(engine, served_model_name=("mine",))


def _check_head(answer: Any, prefix: str) -> None:
    name, _, number = answer["id"].partition("-")
    assert (name, len(number), answer["model"]) == (prefix, 32, "mine")
    if prefix != "rerank":
        assert answer["object"] == "list"
        assert isinstance(answer["created"], int)
        assert abs(answer["created"] - time.time()) < 5


async def test_scores_are_the_engines_in_input_order(caller: Caller) -> None:
    for path in ("/score", "/v1/score"):
        expected = (await caller.engine.score(QUERY, DOCUMENTS)).scores
        answer = await caller.json(path, {"queries": QUERY, "documents": DOCUMENTS})
        assert set(answer) == {"id", "object", "created", "model", "data", "usage", "score_scale"}
        _check_head(answer, "score")
        again = await caller.json(path, {"queries": QUERY, "documents": DOCUMENTS})
        assert again["id"] != answer["id"]
        assert [set(item) for item in answer["data"]] == [{"index", "object", "score"}] * 3
        assert [item["index"] for item in answer["data"]] == [0, 1, 2]
        assert {item["object"] for item in answer["data"]} == {"score"}
        assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-4)
        assert max(expected) == expected[1]


@pytest.mark.parametrize("path", RERANKS)
async def test_documents_are_ranked_best_first(caller: Caller, path: str) -> None:
    expected = (await caller.engine.score(QUERY, DOCUMENTS)).scores
    order = sorted(range(3), key=lambda i: -expected[i])
    for value in (None, True, False):
        answer = await caller.json(
            path, {"query": QUERY, "documents": DOCUMENTS, "return_documents": value, "top_n": 0}
        )
        assert set(answer) == {"id", "model", "results", "usage", "meta", "score_scale"}
        _check_head(answer, "rerank")
        assert answer["meta"] == {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": answer["usage"]["prompt_tokens"]},
        }
        assert [item["index"] for item in answer["results"]] == order
        for item in answer["results"]:
            text = {} if value is False else {"document": {"text": DOCUMENTS[item["index"]]}}
            score = pytest.approx(expected[item["index"]], abs=1e-4)
            assert item == {"index": item["index"], "relevance_score": score} | text
        bare = await caller.json(path, {"query": QUERY, "texts": DOCUMENTS, "return_text": value})
        assert [item["index"] for item in bare] == order
        for item in bare:
            text = {"text": DOCUMENTS[item["index"]]} if value else {}
            score = pytest.approx(expected[item["index"]], abs=1e-4)
            assert item == {"index": item["index"], "score": score} | text
    for top_n in (2, 4):
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
    assert (await caller.json("/rerank", rerank))["usage"] == {
        "prompt_tokens": 15,
        "total_tokens": 15,
        "prompt_tokens_details": details,
    }
    assert (await caller.json("/score", score))["usage"]["prompt_tokens_details"] == details
    for path in ("/v1/embeddings", "/pooling"):
        answer = await caller.json(path, {"input": ["hello", "two words"]})
        assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


async def test_an_input_above_the_models_length_is_cut_or_a_400(caller: Caller) -> None:
    refuse = {"long_documents": "error"}
    for path, body, strict in (
        ("/score", lambda text: {"queries": "q", "documents": ["d", text]}, refuse),
        ("/v1/embeddings", lambda text: {"input": text}, refuse),
        ("/v2/embed", lambda text: {"texts": [text]}, {"truncate": "NONE"}),
        ("/rerank", lambda text: {"query": "q", "texts": [text]}, {"truncate": False}),
    ):
        fits, too_long = body("word " * 254), body("word " * 255)
        fitting = await caller.post(path, fits | strict)
        assert fitting.status == 200
        assert "x-maxsimd-warnings" not in fitting.headers
        cut = await caller.post(path, too_long)
        assert cut.status == 200
        assert cut.headers["x-maxsimd-warnings"].startswith("1 input was longer than the model reads")
        answer = json.loads(cut.body)
        if isinstance(answer, dict):
            assert answer["warnings"] == [cut.headers["x-maxsimd-warnings"]]
        status, error = await caller.error(path, too_long | strict)
        assert status == 400, path
        assert "257 tokens, but at most 256 can be run" in error["message"]


async def test_a_cut_by_the_requests_own_limit_names_it(caller: Caller) -> None:
    for path, body, name, value, cut_field in (
        ("/rerank", {"query": "q", "documents": ["two words"]}, "max_tokens_per_doc", 1, "documents"),
        ("/score", {"queries": "two words", "documents": ["d"]}, "max_tokens_per_query", 1, "queries"),
        ("/v1/embeddings", {"input": "two words"}, "truncate_prompt_tokens", 3, "input"),
    ):
        cut = await caller.json(path, body | {name: value})
        assert f"1 input was longer than this request's {name} ({value})," in cut["warnings"][0]
        status, error = await caller.error(path, body | {name: value, "long_documents": "error"})
        assert (status, error["param"]) == (400, cut_field)
        assert "warnings" not in await caller.json(path, body | {name: value + 1, "long_documents": "error"})


async def test_embeddings_are_the_engines(caller: Caller) -> None:
    expected = (await caller.engine.embed(["hello", "two words"])).embeddings
    for path, name, kind, prefix, change in (
        ("/v1/embeddings", "embedding", "embedding", "embd", {}),
        ("/pooling", "data", "pooling", "pooling", {"task": "embed"}),
    ):
        answer = await caller.json(path, {"input": ["hello", "two words"]} | change)
        assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
        _check_head(answer, prefix)
        assert [set(item) for item in answer["data"]] == [{"index", "object", name}] * 2
        assert [item["index"] for item in answer["data"]] == [0, 1]
        assert {item["object"] for item in answer["data"]} == {kind}
        np.testing.assert_allclose([item[name] for item in answer["data"]], expected, atol=1e-5)
        short = await caller.json(path, {"input": "hello", "dimensions": 2} | change)
        cut = expected[0, :2] / np.linalg.norm(expected[0, :2])
        np.testing.assert_allclose(short["data"][0][name], cut, atol=1e-5)


async def test_pooling_gives_token_vectors_by_default(caller: Caller) -> None:
    expected = (await caller.engine.embed_tokens(["hello", "two words"])).embeddings
    for task in ({}, {"task": "token_embed"}):
        answer = await caller.json("/pooling", {"input": ["hello", "two words"]} | task)
        for item, matrix in zip(answer["data"], expected, strict=True):
            np.testing.assert_allclose(item["data"], matrix, atol=1e-5)
    assert [matrix.shape for matrix in expected] == [(3, 384), (4, 384)]


async def test_base64_is_little_endian_float32_in_row_order(caller: Caller) -> None:
    for path, name in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        body = {"input": ["hello", "two words"]}
        floats = (await caller.json(path, body | {"encoding_format": "float"}))["data"]
        encoded = (await caller.json(path, body | {"encoding_format": "base64"}))["data"]
        for item, packed in zip(floats, encoded, strict=True):
            values = np.frombuffer(base64.b64decode(packed[name]), dtype="<f4")
            np.testing.assert_allclose(values, np.ravel(item[name]), atol=1e-6)


async def test_more_vectors_than_an_answer_has_room_for_are_refused(engine: RecordingEngine) -> None:
    """With 384 dimensions a mebibyte has room for 113 vectors, with 64 for 682."""
    caller = Caller(engine, max_bodies_mb=1)
    body = {"input": ["a " * 54] * 2, "task": "token_embed"}  # of 56 tokens each
    assert len((await caller.json("/pooling", body))["data"]) == 2
    body["input"] = ["a " * 55] * 2
    status, error = await caller.error("/pooling", body)
    assert status == 413
    shown = "these texts have 114 tokens, a vector each, and an answer has room for 113 of them"
    assert error["message"].startswith(shown)
    assert len((await caller.json("/pooling", body | {"dimensions": 64}))["data"]) == 2
    texts, shown = ["a"] * 114, "114 vectors of 384 numbers would be made, and there is room for 113"
    for path, asked in (
        ("/v1/embeddings", {"input": texts}),
        ("/embed", {"inputs": texts}),
        ("/v2/embed", {"model": "all-MiniLM-L6-v2", "texts": texts, "input_type": "search_document"}),
    ):
        status, error = await caller.error(path, asked)
        assert (status, error["message"][: len(shown)]) == (413, shown)
    assert len((await caller.json("/v1/embeddings", {"input": texts, "dimensions": 64}))["data"]) == 114


async def test_a_model_without_classifier_does_not_classify(caller: Caller) -> None:
    for path, body in (
        ("/classify", {"input": "a"}),
        ("/predict", {"inputs": ["a", "b"]}),
        ("/pooling", {"input": "a", "task": "classify"}),
    ):
        status, error = await caller.error(path, body)
        assert (status, error["param"]) == (400, "task")
        assert error["message"] == "this model cannot classify; it can embed and token_embed"
    for task in (None, "token_embed", "embed"):
        status, error = await caller.error("/pooling", {"input": "a", "task": task, "use_activation": False})
        assert (status, error["param"]) == (400, "use_activation")
        await caller.json("/pooling", {"input": "a", "task": task, "use_activation": True})


async def test_a_model_without_a_template_reads_no_messages(caller: Caller) -> None:
    messages = [{"role": "user", "content": "a"}]
    status, error = await caller.error("/v1/embeddings", {"messages": messages})
    assert (status, "no chat template" in error["message"]) == (400, True)


async def test_the_model_card_says_what_runs(caller: Caller) -> None:
    answer = await caller.ask("GET", "/v1/models")
    listed = json.loads(answer.body)
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert abs(card.pop("created") - time.time()) < 5
    findings = caller.engine.device_model.prepared.findings
    assert card.pop("checked") == [str(finding) for finding in findings]
    assert card == {
        "id": "mine",
        "object": "model",
        "owned_by": "maxsimd",
        "root": "all-MiniLM-L6-v2",
        "state": "ok",
        "max_model_len": 256,
        "score_type": "late-interaction",
        "score_scale": {"transform": "maxsim", "min": None, "max": None},
        "normalized_score_scale": {"transform": "clipped meanmaxsim", "min": 0.0, "max": 1.0},
        "execution": "packed",
        "device": "cpu",
        "kernels": caller.engine.facts.kernels,
    }


async def test_metrics_are_prometheuss_text(caller: Caller) -> None:
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
    version = json.loads((await caller.ask("GET", "/version")).body)
    assert version == {"version": maxsimd.__version__}


async def test_the_cache_can_be_emptied(caller: Caller) -> None:
    body = {"query": "q", "documents": ["one", "two"]}
    await caller.json("/rerank", body)
    assert "prompt_tokens_details" in (await caller.json("/rerank", body))["usage"]
    answer = await caller.ask("DELETE", "/cache")
    assert (answer.status, answer.body) == (204, b"")
    assert "Content-Type" not in answer.headers
    assert "prompt_tokens_details" not in (await caller.json("/rerank", body))["usage"]
