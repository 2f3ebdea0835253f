"""One vector of a text's token vectors, over HTTP and from the cache."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maxsimd.engine import Engine, EngineConfig, InvalidRequestError, Muvera
from tests.unit.calling_handlers import Caller, RecordingEngine

TEXTS = ["Berlin is the capital of Germany.", "It lies on the Spree.", "a", "Paris is the capital of France."]
SMALL: dict[str, Any] = {"k_sim": 2, "r_reps": 3, "d_proj": 8}


def vectors_of(answer: Any) -> NDArray[Any]:
    return np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)


async def test_a_vector_is_that_of_the_token_vectors(caller: Caller) -> None:
    for input_type in ("query", "document"):
        body = {"input": TEXTS, "encoding": "muvera", "input_type": input_type}
        answer = await caller.json("/v1/embeddings", body)
        tokens = await caller.engine.embed_tokens(TEXTS, input_type=input_type)
        expected = Muvera().encode(tokens.embeddings, input_type)
        np.testing.assert_allclose(vectors_of(answer), expected, atol=1e-6)
        assert answer["usage"]["prompt_tokens"] == tokens.usage.prompt_tokens
        assert answer["encoding"] == {
            "name": "muvera",
            "k_sim": 3,
            "r_reps": 40,
            "d_proj": 32,
            "d_final": None,
            "full_length": True,
            "seed": 0,
        }


async def test_the_parameters_of_an_answer_can_be_sent_again(caller: Caller) -> None:
    body = {"input": TEXTS, "encoding": "muvera", "input_type": "document"}
    first = await caller.json("/v1/embeddings", {**body, "muvera": {**SMALL, "d_final": 20, "seed": 5}})
    again = await caller.json("/v1/embeddings", {**body, "muvera": first["encoding"]})
    assert vectors_of(first).shape == (4, 20)
    np.testing.assert_array_equal(vectors_of(first), vectors_of(again))
    unprojected = await caller.json("/v1/embeddings", {**body, "muvera": {**SMALL, "d_proj": 0}})
    assert vectors_of(unprojected).shape == (4, 4 * 3 * 384)
    assert unprojected["encoding"]["d_proj"] == 0
    whole = await caller.post("/v1/embeddings", {**body, "muvera": SMALL, "encoding_format": "safetensors"})
    length = int.from_bytes(whole.body[:8], "little")
    about = json.loads(json.loads(whole.body[8 : 8 + length])["__metadata__"]["encoding"])
    assert (about["k_sim"], about["d_final"]) == (2, None)


async def test_a_wrong_request_is_refused(caller: Caller) -> None:
    for path, more, param in (
        ("/v1/embeddings", {"input_type": None}, "input_type"),
        ("/v1/embeddings", {"dimensions": 8}, "dimensions"),
        ("/v1/embeddings", {"late_chunking": True}, "late_chunking"),
        ("/v1/embeddings", {"muvera": {"d_proj": 385}}, "muvera"),
        ("/v1/embeddings", {"muvera": {"k_sim": 13}}, "muvera"),
        ("/v1/embeddings", {"encoding": None, "muvera": {"k_sim": 3}}, "muvera"),
        ("/v1/embeddings", {"encoding": "other"}, "encoding"),
        ("/v1/multi-vector", {}, "encoding"),
        ("/pooling", {"task": "token_embed"}, "encoding"),
    ):
        status, error = await caller.error(
            path, {"input": TEXTS, "encoding": "muvera", "input_type": "document", **more}
        )
        assert status == 400
        assert error["param"].startswith(param)


async def test_an_answer_has_no_more_numbers_than_there_is_room_for(engine: RecordingEngine) -> None:
    caller = Caller(engine, max_bodies_mb=1)
    body = {"input": TEXTS, "encoding": "muvera", "input_type": "document", "muvera": SMALL}
    await caller.json("/v1/embeddings", body)
    status, error = await caller.error("/v1/embeddings", {**body, "input": ["a"] * 500})
    assert status == 413
    assert "room for 455" in error["message"]


@pytest.mark.parametrize(
    "precision",
    [
        "float32",
        pytest.param("bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("int8", marks=pytest.mark.exhaustive),
    ],
)
async def test_cached_token_vectors_give_the_same_vectors(precision: Any) -> None:
    config = EngineConfig(dtype="float32", threads=1, cache_precision=precision)
    options: dict[str, Any] = {"encoding": Muvera(**SMALL)}
    async with Engine(config) as engine:
        run = await engine.embed(TEXTS, input_type="document", **options)
        assert run.usage.cached_documents == 0
        await engine.score("what is it", TEXTS[1:])
        cached = await engine.embed(TEXTS, input_type="document", **options)
        np.testing.assert_allclose(cached.embeddings, run.embeddings, atol=1e-5)
        assert cached.usage.cached_documents == 3
        assert cached.usage.prompt_tokens == run.usage.prompt_tokens
        all_cached = await engine.embed(TEXTS[1:], input_type="document", **options)
        assert all_cached.usage.cached_tokens == all_cached.usage.prompt_tokens
        np.testing.assert_array_equal(all_cached.embeddings, cached.embeddings[1:])
        as_query = await engine.embed(TEXTS[1:], input_type="query", **options)
        assert as_query.usage.cached_documents == 0


async def test_a_document_cached_through_windows_is_not_reused(engine: RecordingEngine) -> None:
    document, options = "word " * 400, {"input_type": "document", "encoding": Muvera(**SMALL)}
    await engine.clear_cache()
    run = await engine.embed([document], truncation="window", **options)  # type: ignore[arg-type]
    await engine.score("what is it", [document], truncation="window")
    again = await engine.embed([document], truncation="window", **options)  # type: ignore[arg-type]
    np.testing.assert_allclose(again.embeddings, run.embeddings, atol=1e-5)


async def test_a_model_that_compares_one_vector_a_text_is_refused() -> None:
    async with Engine(EngineConfig(score_type="bi-encoder", threads=1)) as engine:
        with pytest.raises(InvalidRequestError, match="late interaction"):
            await engine.embed("a", encoding="muvera", input_type="document")
