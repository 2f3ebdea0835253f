"""Answers of the routes that label tokens, and of the others for such a model."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from maxsimd.api.fleet.engine_answers import EngineAnswers
from maxsimd.api.fleet.fleet_engine import FleetEngine
from maxsimd.api.fleet.link import Door, UnixAddress
from maxsimd.api.fleet.roster import Listed, Roster
from maxsimd.engine import EngineConfig, InvalidRequestError
from maxsimd.engine.processors.token_classification import probabilities
from tests.checkpoints import token_classifiers
from tests.checkpoints.shared import SharedCheckpoints
from tests.checkpoints.token_classifiers import LABELS
from tests.unit.calling_handlers import Caller, RecordingEngine

TEXTS = ["Sarah lives in Z\u00fcrich  \U0001f469\u200d\U0001f4bb and U.K.", "a file is opened", ""]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(checkpoints: SharedCheckpoints) -> AsyncIterator[RecordingEngine]:
    path = checkpoints(token_classifiers.labeled)
    async with RecordingEngine(EngineConfig(model=path, dtype="float32", threads=1)) as engine:
        yield engine


@pytest.fixture
def caller(engine: RecordingEngine) -> Caller:
    return Caller(engine, served_model_name=("mine",))


def _entities(result: Any, label: str = "label") -> list[list[dict[str, Any]]]:
    """The engine's entities as the routes write them."""
    shown = []
    for found in result.entities:
        shown.append([])
        for one in found:
            score = pytest.approx(one.score, abs=1e-5)
            entity = {label: one.label, "score": score, "word": one.word, "start": one.start, "end": one.end}
            shown[-1].append(entity | ({"index": one.index} if label == "entity" else {}))
    return shown


async def test_entities_have_their_characters(caller: Caller) -> None:
    for path in ("/v1/token-classify", "/token-classify", "/invocations"):
        for strategy in (None, "simple", "max"):
            options: Any = {"aggregation_strategy": strategy or "none", "ignore_labels": ["MISC"]}
            result = await caller.engine.token_classify(TEXTS, **options)
            body = {"input": TEXTS, "aggregation_strategy": strategy, "ignore_labels": ["MISC"]}
            answer = await caller.json(path, body)
            assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
            assert (answer["object"], answer["model"], answer["id"][:7]) == ("list", "mine", "tokens-")
            assert [each["index"] for each in answer["data"]] == [0, 1, 2]
            assert [each["entities"] for each in answer["data"]] == _entities(result)
            assert answer["usage"]["prompt_tokens"] == result.usage.prompt_tokens
    long = {"input": "word " * 600, "aggregation_strategy": "simple"}
    assert len((await caller.json("/v1/token-classify", long))["warnings"]) == 1
    assert "warnings" not in await caller.json("/v1/token-classify", long | {"stride": 8})


async def test_predict_tokens_gives_basetens_shape(caller: Caller) -> None:
    logits = (await caller.engine.token_classify(TEXTS, return_logits=True)).logits
    assert logits is not None
    for path in ("/predict_tokens", "/"):
        rows = await caller.json(path, {"inputs": [[text] for text in TEXTS]})
        raw = await caller.json(path, {"inputs": TEXTS, "raw_scores": True})
        for text, tokens, row, of_raw in zip(TEXTS, logits, rows, raw, strict=True):
            assert [one["token_id"] for one in row] == tokens.ids.tolist()
            assert (row[0]["token"], row[-1]["token"], row[0]["end"]) == ("[CLS]", "[SEP]", 0)
            assert [one["token"] for one in row[1:-1]] == [text[a:b] for a, b in tokens.spans[1:-1].tolist()]
            found = probabilities(tokens.logits)
            for one, of_all, scores, expected in zip(row, of_raw, found, tokens.logits, strict=True):
                ((label, score),) = one["results"].items()
                assert (label, score) == (LABELS[scores.argmax()], pytest.approx(scores.max(), abs=1e-5))
                assert tuple(of_all["results"]) == LABELS
                np.testing.assert_allclose([*of_all["results"].values()], expected, atol=1e-3)
    (spans,) = await caller.json("/predict_tokens", {"inputs": TEXTS[0], "aggregation_strategy": "max"})
    (expected,) = (await caller.engine.token_classify(TEXTS[0], aggregation_strategy="max")).entities
    assert [(one["token"], one["token_id"], [*one["results"]]) for one in spans] == [
        (TEXTS[0][one.start : one.end], 0, [one.label]) for one in expected
    ]
    wrong = {"inputs": "a", "raw_scores": True, "aggregation_strategy": "max"}
    await caller.refused("/predict_tokens", wrong, 400, "raw_scores", "not joined")


async def test_hugging_faces_client_gets_the_pipelines_shape(caller: Caller) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "entity_group"),
        ({"aggregation_strategy": "average", "ignore_labels": []}, "entity_group"),
        ({"aggregation_strategy": "none"}, "entity"),
    ]
    for parameters, label in cases:
        result = await caller.engine.token_classify(TEXTS, **{"aggregation_strategy": "simple"} | parameters)
        expected = _entities(result, label)
        for path in ("/predict_tokens", "/", "/invocations"):
            assert await caller.json(path, {"inputs": TEXTS, "parameters": parameters}) == expected
            assert await caller.json(path, {"inputs": TEXTS[0], "parameters": parameters}) == expected[0]


async def test_pooling_gives_a_row_for_each_token(caller: Caller) -> None:
    logits = (await caller.engine.token_classify(TEXTS, return_logits=True)).logits
    assert logits is not None
    for task in ({}, {"task": "token_classify"}):
        for activated in (True, False, None):
            answer = await caller.json("/pooling", {"input": TEXTS, "use_activation": activated} | task)
            for item, tokens in zip(answer["data"], logits, strict=True):
                expected = tokens.logits if activated is False else probabilities(tokens.logits)
                np.testing.assert_allclose(item["data"], expected, atol=1e-3)


async def test_a_token_classifier_does_nothing_else(caller: Caller) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/score", {"queries": "a", "documents": ["b"]}, "this model labels tokens"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "this model labels tokens"),
        ("/v1/embeddings", {"input": "a"}, "this model cannot embed; it can token_classify"),
        ("/classify", {"input": "a"}, "this model cannot classify; it can token_classify"),
        ("/v1/token-classify", {"input": "a", "stride": 3}, "set aggregation_strategy to simple"),
    ]
    for path, body, message in cases:
        await caller.refused(path, body, 400, says=message)
    accepting = Caller(caller.engine, accept_token_ids=True)
    await accepting.refused("/v1/token-classify", {"input": [101, 102]}, 400, "input", "must be texts")
    (card,) = json.loads((await caller.ask("GET", "/v1/models")).body)["data"]
    assert (card["score_type"], card["score_scale"]) == ("token-classifier", None)
    kind = json.loads((await caller.ask("GET", "/info")).body)["model_type"]
    assert [*kind["classifier"]["id2label"].values()] == [*LABELS]


async def test_labels_are_no_more_than_there_is_room_for(engine: RecordingEngine) -> None:
    small = Caller(engine, max_bodies_mb=1)
    text = "word " * 300
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/token-classify", "input", {}),
        ("/predict_tokens", "inputs", {"raw_scores": True}),
        ("/pooling", "input", {"task": "token_classify"}),
    ]
    rooms = []
    for path, name, more in cases:
        error = await small.refused(path, {name: [text] * 100} | more, 413, says="an answer has room for ")
        room = int(error["message"].partition("room for ")[2].split()[0])
        rooms.append(room)
        await small.json(path, {name: [text] * (room // 302)} | more)
    assert rooms == [2314, 911, 7281]


async def test_a_front_of_replicas_gives_the_same(engine: RecordingEngine, tmp_path: Path) -> None:
    answers = EngineAnswers(engine)
    door = Door(answers, answers.queued_tokens)
    await door.open(str(tmp_path / "engine"))
    front = FleetEngine(Roster([Listed(0, UnixAddress(str(tmp_path / "engine")))]))
    try:
        await front.start()
        options: Any = {"aggregation_strategy": "simple", "ignore_labels": [], "stride": 8}
        long = [*TEXTS, "word " * 600]
        found, expected = [await each.token_classify(long, **options) for each in (front, engine)]
        assert (found.entities, found.usage) == (expected.entities, expected.usage)
        (tokens,) = (await front.token_classify(TEXTS[0], return_logits=True)).logits or ()
        (own,) = (await engine.token_classify(TEXTS[0], return_logits=True)).logits or ()
        np.testing.assert_array_equal(tokens.spans, own.spans)
        np.testing.assert_allclose(tokens.logits, own.logits, atol=1e-4)
        for wrong, says in (
            ({"texts": ["a", "\ud83d"]}, "input[1] has half"),
            ({"stride": 999}, "stride is 999"),
        ):
            with pytest.raises(InvalidRequestError) as raised:
                await front.token_classify(**{"texts": "a", "aggregation_strategy": "max"} | wrong)
            assert says in str(raised.value)
        with pytest.raises(InvalidRequestError, match="labels tokens"):
            await front.score("a", ["b"])
    finally:
        await front.stop()
        await door.close()
