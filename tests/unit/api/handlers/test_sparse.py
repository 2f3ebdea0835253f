"""Routes where a model gives sparse vectors: /embed_sparse, and errors that name it on the others."""

import json
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock

import numpy as np
import pytest
import pytest_asyncio

from maxsimd.api.fleet.engine_answers import EngineAnswers
from maxsimd.api.fleet.messages import Ask, EmbeddedSparse, Reply, decode_to_engine, decode_to_front, encode
from maxsimd.api.fleet.spread import EmbedJob
from maxsimd.api.handlers import tei
from maxsimd.engine import EngineConfig
from tests.unit.calling_handlers import Caller, RecordingEngine

TEXTS = ["Paris is in France.", "Berlin is in Germany."]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(opensearch: str) -> AsyncIterator[RecordingEngine]:
    async with RecordingEngine(EngineConfig(model=opensearch, dtype="float32", threads=1)) as engine:
        yield engine


async def test_weights_are_a_bare_list_of_lists(caller: Caller, engine: RecordingEngine) -> None:
    for path, texts, role in (
        ("/embed_sparse", TEXTS, None), ("/", TEXTS, None), ("/", TEXTS[0], None),
        ("/invocations", TEXTS, None), ("/embed_sparse", TEXTS, "query"),
        ("/embed_sparse", TEXTS, "document"),
    ):  # fmt: skip
        answer = await caller.json(path, {"inputs": texts} | ({"input_type": role} if role else {}))
        given = [texts] if isinstance(texts, str) else texts
        expected = (await engine.embed_sparse(given, input_type=role)).embeddings
        for found, vector in zip(answer, expected, strict=True):
            assert len(found) > 2
            assert all(each.keys() == {"index", "value"} for each in found)
            assert [each["index"] for each in found] == vector.indices.tolist()
            np.testing.assert_allclose([each["value"] for each in found], vector.values, atol=1e-5)
    assert json.loads((await caller.ask("GET", "/info")).body)["model_type"] == {
        "embedding": {"pooling": "splade"},
        "reranker": {"id2label": {"0": "relevance"}, "label2id": {"relevance": 0}},
    }
    answer = await caller.post("/embed_sparse", {"inputs": "word " * 2000, "truncate": True})
    assert (answer.status, "x-compute-tokens" in answer.headers) == (200, True), answer.headers
    assert "truncated" in answer.headers["x-maxsimd-warnings"]
    refused = await caller.post("/embed_sparse", {"inputs": "word " * 2000, "truncate": False})
    assert refused.status in (400, 413)


async def test_what_is_for_other_vectors_is_refused(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"/v1/embeddings": "sparse_embed", "/v1/multi-vector": "sparse_embed", "/pooling": "/embed_sparse"}
    for path, message in said.items():
        await caller.refused(path, {"input": TEXTS}, 400, says=message)
    for name, value in (("normalize", True), ("dimensions", 4), ("input_type", "poem")):
        path = "/embed_sparse" if name == "input_type" else "/"
        await caller.refused(path, {"inputs": TEXTS, name: value}, 400, name)
    await Caller(caller.engine, normalize_scores=True).json("/rerank", {"query": "a", "documents": TEXTS})
    monkeypatch.setattr(tei, "_BYTES_A_WORD", 1 << 40)
    await caller.refused("/embed_sparse", {"inputs": TEXTS}, 413, says="send fewer texts")


async def test_an_engine_of_several_answers_its_front_alike(engine: RecordingEngine) -> None:
    job = EmbedJob(tuple(TEXTS), {"input_type": "query"}, "sparse_embed")
    asked = decode_to_engine(encode(Ask(1, job.question(np.arange(len(TEXTS)), None))))
    assert isinstance(asked, Ask)
    answer = await EngineAnswers(engine)(asked.question, AsyncMock(side_effect=AssertionError))
    arrived = decode_to_front(encode(Reply(1, answer))).answer
    assert isinstance(arrived, EmbeddedSparse)
    expected = (await engine.embed_sparse(TEXTS, input_type="query")).embeddings
    for found, right in zip(arrived.result.embeddings, expected, strict=True):
        assert found.indices.tolist() == right.indices.tolist()
        assert found.values.tolist() == pytest.approx(right.values.tolist())
