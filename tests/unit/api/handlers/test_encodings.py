"""One vector of a text's token vectors, or one for each of its chunks, over HTTP and from the cache."""

import asyncio
import json
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maxsimd.engine import Engine, EngineConfig, Muvera, RequestTooLargeError
from maxsimd.engine import engine as engine_module
from maxsimd.engine.preprocess.workers import yield_to_smaller
from maxsimd.engine.tenants import Tenant
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
        shown = {"name": "muvera", "k_sim": 3, "r_reps": 40, "d_proj": 32, "d_final": None}
        assert answer["encoding"] == shown | {"full_length": True, "seed": 0}


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
    encoded = {"input": TEXTS, "encoding": "muvera", "input_type": "document"}
    chunked = {"input": "ab", "late_chunking": True}
    for path, body, param in (
        ("/v1/embeddings", encoded | {"input_type": None}, "input_type"),
        ("/v1/embeddings", encoded | {"dimensions": 8}, "dimensions"),
        ("/v1/embeddings", encoded | {"late_chunking": True}, "late_chunking"),
        ("/v1/embeddings", encoded | {"muvera": {"d_proj": 385}}, "muvera"),
        ("/v1/embeddings", encoded | {"muvera": {"k_sim": 13}}, "muvera"),
        ("/v1/embeddings", encoded | {"encoding": None, "muvera": {"k_sim": 3}}, "muvera"),
        ("/v1/multi-vector", encoded, "encoding"),
        ("/pooling", encoded | {"task": "token_embed"}, "encoding"),
        ("/v1/embeddings", {"input": ["a", "b"], "chunks": [[0, 1]]}, "chunks"),
        ("/v1/embeddings", chunked | {"chunks": [[0, 1]], "late_chunking": False}, "chunks"),
        ("/v1/embeddings", chunked | {"chunks": [[0, 3]]}, "chunks"),
        ("/v1/embeddings", chunked | {"input": ["a", " "]}, "input"),
        ("/v1/embeddings", chunked | {"input": "word " * 300}, "input"),
        ("/v1/embeddings", chunked | {"truncate_prompt_tokens": 10}, "truncate_prompt_tokens"),
        ("/v1/multi-vector", chunked, "late_chunking"),
        ("/pooling", chunked | {"task": "token_embed"}, "late_chunking"),
    ):
        status, error = await caller.error(path, body)
        assert status == 400
        assert error["param"].startswith(param)


async def test_an_answer_has_no_more_numbers_than_there_is_room_for(engine: RecordingEngine) -> None:
    caller = Caller(engine, max_bodies_mb=1)
    body = {"input": TEXTS, "encoding": "muvera", "input_type": "document", "muvera": SMALL}
    await caller.json("/v1/embeddings", body)
    status, error = await caller.error("/v1/embeddings", {**body, "input": ["a"] * 500})
    assert status == 413
    assert "room for 455" in error["message"]
    # However short it becomes in the end.
    body["muvera"] = SMALL | {"k_sim": SMALL["k_sim"] + 3, "d_final": 8}
    status, error = await caller.error("/v1/embeddings", {**body, "input": ["a"] * 60})
    assert (status, "room for 56" in error["message"]) == (413, True)
    caller = Caller(engine, max_documents=2)
    chunks = {"input": "a b c", "late_chunking": True, "chunks": [[0, 1], [2, 3], [4, 5]]}
    assert (await caller.error("/v1/embeddings", chunks))[0] == 413


async def test_making_vectors_ends_at_the_timeout(
    engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[float] = []

    def slow(*arguments: object) -> None:
        begun = time.monotonic()
        try:
            while time.monotonic() < begun + 10:
                time.sleep(0.01)
                yield_to_smaller()
        finally:
            ended.append(time.monotonic() - begun)

    monkeypatch.setattr(engine_module, "encoded_result", slow)
    body = {"input": "a", "encoding": "muvera", "input_type": "query", "timeout": 0.5}
    answer = await Caller(engine).ask("POST", "/v1/embeddings", body)
    assert answer.status == 504
    while not ended:
        await asyncio.sleep(0.01)
    assert ended[0] < 5


async def test_long_vectors_have_a_price(engine: RecordingEngine) -> None:
    texts = ["a"] * 40
    long = Muvera(k_sim=12, r_reps=64, d_proj=1)
    engine.set_tenants({"": Tenant(max_request_tokens=5000)})
    try:
        with pytest.raises(RequestTooLargeError, match="tokens, more than the 5000"):
            await engine.embed(texts, input_type="document", encoding=long)
        assert len((await engine.embed(texts, input_type="document", encoding="muvera")).embeddings) == 40
    finally:
        engine.set_tenants({})


async def test_cached_token_vectors_give_the_same_vectors() -> None:
    config = EngineConfig(dtype="float32", threads=1, cache_precision="float32")
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
        # A document that was cached through windows is not reused.
        long = "word " * 400
        whole = await engine.embed([long], truncation="window", input_type="document", **options)
        await engine.score("what is it", [long], truncation="window")
        again = await engine.embed([long], truncation="window", input_type="document", **options)
        np.testing.assert_allclose(again.embeddings, whole.embeddings, atol=1e-5)
        as_query = await engine.embed(TEXTS[1:], input_type="query", **options)
        assert as_query.usage.cached_documents == 0


CHUNKS = ["Berlin is the capital of Germany. ", "It lies on the Spree", " and has many lakes."]


async def test_chunks_come_as_texts_or_by_their_characters(caller: Caller) -> None:
    ends = np.cumsum([len(chunk) for chunk in CHUNKS]).tolist()
    spans = [*zip([0, *ends], ends, strict=False)]
    by_text = await caller.json("/v1/embeddings", {"input": CHUNKS, "late_chunking": True})
    by_character = await caller.json(
        "/v1/embeddings", {"input": "".join(CHUNKS), "late_chunking": True, "chunks": spans}
    )
    whole = await caller.json("/v1/embeddings", {"input": "".join(CHUNKS)})
    alone = await caller.json("/v1/embeddings", {"input": CHUNKS, "late_chunking": False})
    vectors = [np.array([item["embedding"] for item in answer["data"]]) for answer in (by_text, by_character)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    assert [item["index"] for item in by_text["data"]] == [0, 1, 2]
    assert by_text["usage"] == whole["usage"]
    assert np.abs(vectors[0] - [item["embedding"] for item in alone["data"]]).max() > 0.01
    short = await caller.json("/v1/embeddings", {"input": CHUNKS, "late_chunking": True, "dimensions": 8})
    cut = vectors[0][:, :8]
    expected = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose([item["embedding"] for item in short["data"]], expected, atol=1e-6)
