"""Scores from 0 to 1 beside what they are made of, and what a server says of the scale of its scores."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.engine import CUT_LONG, EngineConfig, InvalidRequestError
from maxsimd.engine.processors.processor import Normalization
from maxsimd.engine.scoring.scale import ScoreScale, has_bounds, score_scale
from tests.engines import Engines
from tests.unit.calling_handlers import Caller, RecordingEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "how is a file opened"
QUERIES = [QUERY, "sort"]
DOCUMENTS = ["Open a file and return a stream.", "Sort a list in place.", "x"] * 2

SCALES = {
    "stanford_colbert": ScoreScale("maxsim", None, None),
    "native_multi_vector": ScoreScale("maxsim", None, None),
    "qwen3_embedding": ScoreScale("cosine", -1.0, 1.0),
    "bert_cross_encoder": ScoreScale("sigmoid", 0.0, 1.0),
}


@pytest.mark.parametrize("fixture", SCALES)
async def test_scores_are_normalized(fixture: str, request: pytest.FixtureRequest, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=request.getfixturevalue(fixture), dtype="float32"))
    scale, normal = SCALES[fixture], score_scale(engine.model, normalize=True)
    assert (score_scale(engine.model), normal.least, normal.most) == (scale, 0.0, 1.0)
    for queries in (QUERY, QUERIES * 3):

        async def scores(queries: Any = queries, **options: Any) -> np.ndarray:
            return np.array((await engine.score(queries, DOCUMENTS, truncation=CUT_LONG, **options)).scores)

        raw, normalized = await scores(use_activation=False), await scores(normalize=True)
        plain = await scores()
        assert scale.least is None or plain.min() >= scale.least
        assert scale.most is None or plain.max() <= scale.most
        expected = np.clip(raw, 0, 1)
        if scale.transform == "sigmoid":
            expected = 1 / (1 + np.exp(-raw))
        elif scale.transform == "maxsim":
            vectors = await engine.embed_tokens(QUERIES, input_type="query")
            rows = [len(matrix) for matrix in vectors.embeddings]
            expected = np.clip(raw / (rows * 3 if queries != QUERY else rows[0]), 0, 1)
        np.testing.assert_allclose(normalized, expected, rtol=1e-5)


async def test_an_unreadable_document_shifts_no_queries(native_multi_vector: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=native_multi_vector, dtype="float32"))
    queries, documents = [*QUERIES, QUERIES[1]], ["a file", "\ud800", "a list"]
    alone = [await engine.score(queries[i], documents[i], normalize=True) for i in (0, 2)]
    found = await engine.score(queries, documents, normalize=True, on_error="report")
    assert list(found.errors) == [1]
    np.testing.assert_allclose([found.scores[i] for i in (0, 2)], [one.scores[0] for one in alone], rtol=1e-5)


async def test_logits_are_unbounded(bert_cross_encoder: str, qwen3_embedding: str, engines: Engines) -> None:
    model = (await engines(EngineConfig(model=bert_cross_encoder, dtype="float32"))).model
    logit = ScoreScale("logit", None, None)
    assert score_scale(model, use_activation=False) == logit
    assert score_scale(replace(model, activation=torch.nn.Identity())) == logit
    assert score_scale(replace(model, activation=torch.nn.Softplus())) == ScoreScale("softplus", 0.0, None)
    model = (await engines(EngineConfig(model=qwen3_embedding, dtype="float32"))).model
    tasks = {name: replace(task, normalized=False) for name, task in model.tasks.items()}
    for similarity in ("dot", "maxsim", "meanmaxsim"):
        unbounded = replace(model, tasks=tasks, similarity=similarity)
        assert score_scale(unbounded) == ScoreScale(similarity, None, None)
        assert not has_bounds(unbounded)
        with pytest.raises(InvalidRequestError, match="no bounds"):
            Normalization.of(unbounded)
    assert Normalization(False, True, None).apply(np.zeros(1, np.float32), np.array([0])).tolist() == [0]
    for bounded in (replace(model, tasks=tasks, similarity="cosine"), replace(model, similarity="dot")):
        Normalization.of(bounded)
        assert has_bounds(bounded)


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
