"""Scores from 0 to 1, beside what they are made of: raw scores, and the vectors of the query."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError
from maxsimd.engine.results.postprocess import bounded_by
from tests.engines import Engines

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERIES = ["how is a file opened", "sort"]
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
            bounded_by(replace(model, tasks=tasks, similarity=similarity))
    bounded_by(replace(model, tasks=tasks, similarity="cosine"))
    bounded_by(replace(model, similarity="dot"))
