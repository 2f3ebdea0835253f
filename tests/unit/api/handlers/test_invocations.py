"""/invocations answers as the route does that a request is meant for."""

import json
from typing import Any

from maxsimd.engine import EngineConfig
from tests.unit.calling_handlers import Caller, RecordingEngine

QUERY, DOCUMENTS = "how is a file opened", ["Open a file.", "Sort a list in place."]
RANKING: dict[str, dict[str, Any]] = {
    "/rerank": {"query": QUERY, "documents": DOCUMENTS, "top_n": "1"},
    "/v1/rerank": {"query": QUERY, "texts": DOCUMENTS},
    "/score": {"queries": QUERY, "documents": DOCUMENTS},
    "/v1/score": {"text_1": QUERY, "text_2": DOCUMENTS},
}
VECTORS: dict[str, dict[str, Any]] = {
    "/embed": {"inputs": DOCUMENTS},
    "/similarity": {"inputs": {"source_sentence": QUERY, "sentences": DOCUMENTS}},
    "/v1/embeddings": {"input": DOCUMENTS},
    "/pooling": {"input": DOCUMENTS, "task": "embed"},
}
LABELS: dict[str, dict[str, Any]] = {
    "/predict": {"inputs": DOCUMENTS[0]},
    "/classify": {"input": DOCUMENTS},
    "/pooling": {"input": DOCUMENTS, "task": "classify"},
}


def _without_what_changes(body: bytes) -> Any:
    answer = json.loads(body)
    if isinstance(answer, dict):
        for name in ("id", "created", "usage", "meta"):
            answer.pop(name, None)
    return answer


async def _compare(engine: RecordingEngine, bodies: dict[str, dict[str, Any]]) -> None:
    caller = Caller(engine)
    for path, body in bodies.items():
        expected = await caller.ask("POST", path, body)
        answer = await caller.ask("POST", "/invocations", body)
        assert (expected.status, answer.status) == (200, 200), answer.body
        assert _without_what_changes(answer.body) == _without_what_changes(expected.body), path


async def test_requests_are_answered_as_their_routes_do(
    engine: RecordingEngine, bert_cross_encoder: str
) -> None:
    await _compare(engine, RANKING | VECTORS)
    config = EngineConfig(model=bert_cross_encoder, dtype="float32", threads=1)
    async with RecordingEngine(config) as classifier:
        await _compare(classifier, RANKING | LABELS)


async def test_what_is_no_request_is_refused(caller: Caller) -> None:
    for body, message in (
        ({}, "query and documents to rank"),
        ([], "Expected"),
        ({"query": QUERY, "documents": []}, "documents is empty"),
        ({"queries": QUERY}, "documents is missing"),
    ):
        status, error = await caller.error("/invocations", body)
        assert status == 400, body
        assert message in error["message"]
    status, error = await caller.error("/invocations", {"input": "a", "model": "none"})
    assert (status, error["param"]) == (404, "model")
