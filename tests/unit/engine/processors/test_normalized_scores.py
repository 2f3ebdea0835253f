"""Scores from 0 to 1 beside what they are made of, and what a server says of the scale of its scores."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError
from maxsimd.engine.processors.plan import Normalization
from maxsimd.engine.scoring.scale import ScoreScale, has_bounds, score_scale
from tests.engines import Engines
from tests.unit.calling_handlers import Caller, RecordingEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "how is a file opened"
QUERIES = [QUERY, "sort"]
DOCUMENTS = ["Open a file and return a stream.", "Sort a list in place.", "x"] * 2


async def _raw_and_normalized(engine: Engine, queries: Any, documents: list[str]) -> tuple[Any, Any]:
    raw = await engine.score(queries, documents, use_activation=False, truncation=CUT_LONG)
    normalized = await engine.score(queries, documents, normalize=True, truncation=CUT_LONG)
    assert all(0 <= score <= 1 for score in normalized.scores)
    return np.array(raw.scores), np.array(normalized.scores)


@pytest.mark.parametrize("fixture", ["stanford_colbert", "native_multi_vector"])
async def test_maxsim_is_the_mean_over_the_querys_tokens(
    fixture: str, request: pytest.FixtureRequest, engines: Engines
) -> None:
    engine = await engines(EngineConfig(model=request.getfixturevalue(fixture), dtype="float32"))
    vectors = await engine.embed_tokens(QUERIES, input_type="query")
    rows = [len(matrix) for matrix in vectors.embeddings]
    raw, normalized = await _raw_and_normalized(engine, QUERIES[0], DOCUMENTS)
    np.testing.assert_allclose(normalized, np.clip(raw / rows[0], 0, 1), rtol=1e-6)
    pairs = [QUERIES[i % 2] for i in range(len(DOCUMENTS))]
    raw, normalized = await _raw_and_normalized(engine, pairs, DOCUMENTS)
    expected = np.clip(raw / [rows[i % 2] for i in range(len(DOCUMENTS))], 0, 1)
    np.testing.assert_allclose(normalized, expected, rtol=1e-6)


async def test_an_unreadable_document_shifts_no_queries(native_multi_vector: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=native_multi_vector, dtype="float32"))
    queries, documents = [*QUERIES, QUERIES[1]], ["a file", "\ud800", "a list"]
    alone = [await engine.score(queries[i], documents[i], normalize=True) for i in (0, 2)]
    found = await engine.score(queries, documents, normalize=True, on_error="report")
    assert list(found.errors) == [1]
    np.testing.assert_allclose([found.scores[i] for i in (0, 2)], [one.scores[0] for one in alone], rtol=1e-5)


async def test_cosines_lose_their_negative_part(qwen3_embedding: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=qwen3_embedding, dtype="float32"))
    raw, normalized = await _raw_and_normalized(engine, QUERIES[0], DOCUMENTS)
    np.testing.assert_allclose(normalized, np.clip(raw, 0, 1), rtol=1e-6)


async def test_of_classifiers_they_are_probabilities(bert_cross_encoder: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=bert_cross_encoder, dtype="float32"))
    raw, normalized = await _raw_and_normalized(engine, QUERIES[0], DOCUMENTS)
    np.testing.assert_allclose(normalized, 1 / (1 + np.exp(-raw)), rtol=1e-5)


async def test_scores_without_bounds_are_refused(qwen3_embedding: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=qwen3_embedding, dtype="float32"))
    model = engine.model
    tasks = {name: replace(task, normalised=False) for name, task in model.tasks.items()}
    for similarity in ("dot", "maxsim", "meanmaxsim"):
        with pytest.raises(InvalidRequestError, match="no bounds"):
            Normalization.of(replace(model, tasks=tasks, similarity=similarity))
    Normalization.of(replace(model, tasks=tasks, similarity="cosine"))
    Normalization.of(replace(model, similarity="dot"))


@pytest.mark.parametrize(
    ("fixture", "expected"),
    [
        ("stanford_colbert", ScoreScale("maxsim", None, None)),
        ("qwen3_embedding", ScoreScale("cosine", -1.0, 1.0)),
        ("bert_cross_encoder", ScoreScale("sigmoid", 0.0, 1.0)),
    ],
)
async def test_scores_are_in_their_scale(
    fixture: str, expected: ScoreScale, request: pytest.FixtureRequest, engines: Engines
) -> None:
    engine = await engines(EngineConfig(model=request.getfixturevalue(fixture), dtype="float32"))
    assert score_scale(engine.model) == expected
    for normalize in (False, True):
        scale = score_scale(engine.model, normalize=normalize)
        scores = (await engine.score(QUERY, DOCUMENTS, normalize=normalize)).scores
        assert scale.least is None or min(scores) >= scale.least
        assert scale.most is None or max(scores) <= scale.most
        if normalize:
            assert (scale.least, scale.most) == (0.0, 1.0)


async def test_logits_and_dots_of_vectors_have_no_bounds(
    bert_cross_encoder: str, qwen3_embedding: str, engines: Engines
) -> None:
    model = (await engines(EngineConfig(model=bert_cross_encoder, dtype="float32"))).model
    logit = ScoreScale("logit", None, None)
    assert score_scale(model, use_activation=False) == logit
    assert score_scale(replace(model, activation=torch.nn.Identity())) == logit
    assert score_scale(replace(model, activation=torch.nn.Softplus())) == ScoreScale("softplus", 0.0, None)
    model = (await engines(EngineConfig(model=qwen3_embedding, dtype="float32"))).model
    tasks = {name: replace(task, normalised=False) for name, task in model.tasks.items()}
    model = replace(model, tasks=tasks, similarity="dot")
    assert score_scale(model) == ScoreScale("dot", None, None)
    assert not has_bounds(model)
    assert has_bounds(replace(model, similarity="cosine"))


async def test_answers_say_it(bert_cross_encoder: str, three_label_classifier: str) -> None:
    logit = {"transform": "logit", "min": None, "max": None}
    async with RecordingEngine(EngineConfig(model=bert_cross_encoder, dtype="float32")) as engine:
        caller = Caller(engine)
        bodies = {
            "/score": {"queries": QUERY, "documents": DOCUMENTS},
            "/rerank": {"query": QUERY, "documents": DOCUMENTS},
            "/v1/rerank": {"query": QUERY, "documents": DOCUMENTS, "top_k": 1},
            "/v2/rerank": {"query": QUERY, "texts": DOCUMENTS},
            "/v1/reranking": {"query": QUERY, "input": DOCUMENTS},
            "/v1/ranking": {"query": {"text": QUERY}, "passages": [{"text": each} for each in DOCUMENTS]},
            "/infinity/rerank": {"query": QUERY, "documents": DOCUMENTS},
        }
        for path, body in bodies.items():
            for raw, wanted in ((False, "sigmoid; bounds=0, 1"), (True, "logit; bounds=none, none")):
                answer = await caller.ask("POST", path, body | {"raw_scores": raw})
                assert answer.headers["x-maxsimd-score-scale"] == wanted, path
        for path in ("/rerank", "/score"):
            assert (await caller.json(path, bodies[path] | {"raw_scores": True}))["score_scale"] == logit
    async with RecordingEngine(EngineConfig(model=three_label_classifier, dtype="float32")) as engine:
        (card,) = json.loads((await Caller(engine).ask("GET", "/v1/models")).body)["data"]
        assert card["score_scale"] is card["normalized_score_scale"] is None
