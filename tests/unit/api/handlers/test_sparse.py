"""What routes answer where a model gives sparse vectors: text-embeddings-inference's /embed_sparse, and
errors that name it on the others."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from maxsimd.api.fleet.embedding import EmbedJob
from maxsimd.api.fleet.engine_answers import EngineAnswers
from maxsimd.api.fleet.messages import Ask, EmbeddedSparse, Reply, decode_to_engine, decode_to_front, encode
from maxsimd.api.handlers import tei
from maxsimd.engine import EngineConfig
from tests.checkpoints import sparse_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.unit.calling_handlers import Caller, RecordingEngine, error_of

TEXTS = ["Paris is in France.", "Berlin is in Germany."]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(checkpoints: SharedCheckpoints) -> AsyncIterator[RecordingEngine]:
    path = checkpoints(sparse_encoders.opensearch_v3)
    async with RecordingEngine(EngineConfig(model=path, dtype="float32", threads=1)) as engine:
        yield engine


async def weights(engine: RecordingEngine, texts: list[str], role: Any = None) -> list[list[dict[str, Any]]]:
    result = await engine.embed_sparse(texts, input_type=role)
    return [
        [
            {"index": index, "value": pytest.approx(value, abs=1e-5)}
            for index, value in zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
        ]
        for vector in result.embeddings
    ]


async def test_weights_are_a_bare_list_of_lists(caller: Caller, engine: RecordingEngine) -> None:
    for path in ("/embed_sparse", "/"):
        answer = await caller.json(path, {"inputs": TEXTS})
        assert answer == await weights(engine, TEXTS)
        assert all(len(each) > 10 for each in answer)
        assert await caller.json(path, {"inputs": TEXTS[0]}) == await weights(engine, TEXTS[:1])


async def test_queries_and_documents_may_be_read_differently(caller: Caller, engine: RecordingEngine) -> None:
    for role in ("query", "document"):
        answer = await caller.json("/embed_sparse", {"inputs": TEXTS, "input_type": role})
        assert answer == await weights(engine, TEXTS, role)
    wrong = await caller.post("/embed_sparse", {"inputs": TEXTS, "input_type": "poem"})
    assert (wrong.status, error_of(wrong)["param"]) == (400, "input_type")


async def test_it_says_that_a_text_was_cut_and_what_it_took(caller: Caller) -> None:
    answer = await caller.post("/embed_sparse", {"inputs": "word " * 2000, "truncate": True})
    assert answer.status == 200
    assert "x-compute-tokens" in answer.headers
    assert "cut" in answer.headers["x-maxsimd-warnings"]
    refused = await caller.post("/embed_sparse", {"inputs": "word " * 2000, "truncate": False})
    assert refused.status in (400, 413)


async def test_invocations_are_told_by_their_fields(caller: Caller, engine: RecordingEngine) -> None:
    assert await caller.json("/invocations", {"inputs": TEXTS}) == await weights(engine, TEXTS)


async def test_routes_for_other_vectors_refuse_and_say_what_there_is(caller: Caller) -> None:
    for path in ("/v1/embeddings", "/v1/multi-vector"):
        refused = await caller.post(path, {"input": TEXTS})
        assert refused.status == 400
        assert "sparse_embed" in error_of(refused)["message"]
    pooled = await caller.post("/pooling", {"input": TEXTS})
    assert pooled.status == 400
    assert "/embed_sparse" in error_of(pooled)["message"]


async def test_what_is_for_dense_vectors_is_refused(caller: Caller) -> None:
    for name, value in (("normalize", True), ("dimensions", 4)):
        refused = await caller.post("/", {"inputs": TEXTS, name: value})
        assert (refused.status, error_of(refused)["param"]) == (400, name)


async def test_an_answer_that_takes_too_much_memory_is_refused(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tei, "_BYTES_A_WORD", 1 << 40)
    refused = await caller.post("/embed_sparse", {"inputs": TEXTS})
    assert refused.status == 413
    assert "send fewer texts" in error_of(refused)["message"]


async def test_it_says_what_it_is(caller: Caller) -> None:
    info = json.loads((await caller.ask("GET", "/info")).body)
    assert info["model_type"] == {"embedding": {"pooling": "splade"}}


async def test_an_engine_of_several_answers_its_front_alike(engine: RecordingEngine) -> None:
    question = EmbedJob(tuple(TEXTS), {"input_type": "query"}).question_of_all("sparse_embed")
    asked = decode_to_engine(encode(Ask(1, question)))
    assert isinstance(asked, Ask)

    async def nothing_before(answer: object) -> None:
        raise AssertionError(answer)

    answer = await EngineAnswers(engine)(asked.question, nothing_before)
    arrived = decode_to_front(encode(Reply(1, answer))).answer
    assert isinstance(arrived, EmbeddedSparse)
    expected = (await engine.embed_sparse(TEXTS, input_type="query")).embeddings
    for found, right in zip(arrived.result.embeddings, expected, strict=True):
        assert found.indices.tolist() == right.indices.tolist()
        assert found.values.tolist() == pytest.approx(right.values.tolist())
