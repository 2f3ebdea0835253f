"""Queries that are encoded once, and scored later: with the scores, tokens and errors of their texts."""

import pickle
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from maxsimd.engine import (
    EngineConfig,
    InvalidRequestError,
    QueryRows,
    RequestTimeoutError,
    Truncation,
    Vectors,
)
from tests.checkpoints import cross_encoders, language_models, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "how is a file opened"
DOCUMENTS = ["Open a file and return a stream.", "Sort a list.", "x", "Cats sleep a lot on the sofa."]
# Late interaction with expansion, attended or not, and with a skip list; and a bi-encoder.
MODELS = ("stanford_colbert", "stanford_colbert_attending", "native_multi_vector", "qwen3_embedding")

MAIN = {
    *((model, "float32", "use") for model in MODELS),
    *((model, "bfloat16", "bypass") for model in ("stanford_colbert", "qwen3_embedding")),
}


@pytest.mark.parametrize(
    ("fixture", "dtype", "cache"),
    [
        pytest.param(*case, marks=() if case in MAIN else pytest.mark.exhaustive)
        for case in product(MODELS, ("float32", "bfloat16"), ("use", "bypass"))
    ],
)
async def test_its_scores_are_those_of_the_text(
    request: pytest.FixtureRequest, engines: Engines, fixture: str, dtype: Any, cache: Any
) -> None:
    engine = await engines(EngineConfig(model=request.getfixturevalue(fixture), dtype=dtype, threads=1))
    for query in (QUERY, "?", "how is a very long file opened " * 9):
        await engine.score(query, DOCUMENTS, cache=cache)
        expected = await engine.score(query, DOCUMENTS, cache=cache)
        rows = await engine.encode_query(query)
        found = await engine.score(rows, DOCUMENTS, cache=cache)
        # What is packed with other texts may differ by a rounding.
        error = 1e-6 if dtype == "float32" or cache == "use" else 1e-2
        np.testing.assert_allclose(found.scores, expected.scores, rtol=error, atol=error)
        assert found.usage == expected.usage
        assert found.usage.query_tokens == rows.tokens > 0
        assert (found.truncated, found.truncated_queries) == (expected.truncated, expected.truncated_queries)
        assert rows.truncated == (expected.truncated_queries == 1)


async def test_it_is_ranked_streamed_and_sent_beside_texts(engines: Engines, stanford_colbert: str) -> None:
    engine = await engines(EngineConfig(model=stanford_colbert, dtype="float32", threads=1))
    rows = pickle.loads(pickle.dumps(await engine.encode_query(QUERY)))
    expected = await engine.rerank(QUERY, DOCUMENTS, top_n=2, normalize=True)
    found = await engine.rerank(rows, DOCUMENTS, top_n=2, normalize=True)
    assert [one.index for one in found.results] == [one.index for one in expected.results]
    scores = [one.score for one in expected.results]
    assert [one.score for one in found.results] == pytest.approx(scores, abs=1e-6)
    async with engine.stream(rows, DOCUMENTS) as stream:
        async for _ in stream:
            pass
    scores = (await engine.score(QUERY, DOCUMENTS)).scores
    assert stream.result.scores == pytest.approx(scores, abs=1e-5)
    explained = await engine.score(rows, DOCUMENTS[:1], explain=True)
    assert explained.explanations[0].matches[0].query_token is None, "the rows do not have the text"
    vectors = (await engine.embed_tokens(QUERY, input_type="query")).embeddings[0]
    mixed = await engine.score([QUERY, rows, Vectors(vectors), rows], DOCUMENTS)
    assert mixed.scores == pytest.approx(scores, abs=1e-5)
    assert mixed.usage.query_tokens == rows.tokens * 3, "vectors that came along were not run"


async def test_lengths_dimensions_and_errors_are_those_of_the_text(
    engines: Engines, stanford_colbert: str
) -> None:
    config = EngineConfig(model=stanford_colbert, dtype="float32", threads=1, dimensions=16)
    engine = await engines(config)
    options: dict[str, Any] = {"truncation": Truncation(max_tokens=-1, max_query_tokens=3)}
    rows = await engine.encode_query(QUERY, **options)
    assert rows.rows.shape[1] == 16
    expected = await engine.score(QUERY, DOCUMENTS, cache="bypass", **options)
    found = await engine.score(rows, DOCUMENTS, cache="bypass", **options)
    assert found.scores == pytest.approx(expected.scores, abs=1e-5)
    assert (found.usage, found.truncated) == (expected.usage, expected.truncated)
    reported = await engine.score(rows, ["a", np.zeros((1, 3))], on_error="report")
    assert [*reported.errors] == [1]
    assert reported.usage.query_tokens == rows.tokens


async def test_an_instruction_is_part_of_it(engines: Engines, qwen3_embedding: str) -> None:
    engine = await engines(EngineConfig(model=qwen3_embedding, dtype="float32", threads=1))
    rows = await engine.encode_query(QUERY, instruction="Find cats")
    expected = await engine.score(QUERY, DOCUMENTS, instruction="Find cats")
    assert (await engine.score(rows, DOCUMENTS)).scores == pytest.approx(expected.scores, abs=1e-6)
    assert expected.scores != (await engine.score(QUERY, DOCUMENTS)).scores
    with pytest.raises(InvalidRequestError, match="give it to encode_query"):
        await engine.score(rows, DOCUMENTS, instruction="Find cats")


async def test_pictures_are_queries_too(engines: Engines, checkpoints: SharedCheckpoints) -> None:
    engine = await engines(EngineConfig(model=checkpoints(visual.colqwen2), dtype="float32", threads=1))
    noise = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    expected = await engine.score(picture, DOCUMENTS, cache="bypass")
    rows = await engine.encode_query(picture)
    found = await engine.score(rows, DOCUMENTS, cache="bypass")
    assert found.scores == pytest.approx(expected.scores, rel=1e-5)
    assert found.usage == expected.usage


async def test_another_model_refuses_it(engines: Engines, stanford_colbert: str, tmp_path: Path) -> None:
    engine = await engines(EngineConfig(model=stanford_colbert, dtype="float32", threads=1))
    rows = await engine.encode_query(QUERY)
    in_bfloat16 = await engines(EngineConfig(model=stanford_colbert, dtype="bfloat16", threads=1))
    assert (await in_bfloat16.encode_query(QUERY)).fingerprint == rows.fingerprint
    # The same architecture, with other weights.
    other = shutil.copytree(stanford_colbert, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "layer.0.attention.self.query.weight" in name)
    weights[name] = weights[name] * 1.001
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    changed = await engines(EngineConfig(model=str(other), threads=1))
    with pytest.raises(InvalidRequestError, match=r"queries\[0\] was encoded by another model") as refused:
        await changed.score(rows, DOCUMENTS)
    assert refused.value.param == "queries"


async def test_what_makes_no_sense_is_refused(engines: Engines, native_multi_vector: str) -> None:
    engine = await engines(EngineConfig(model=native_multi_vector, dtype="float32", threads=1))
    rows = await engine.encode_query(QUERY)
    for query, reason, options in [
        (["a", "b"], "one query to encode, not 2", {}),
        (rows, "is an embedding already", {}),
        ([], "is empty", {}),
        (3, "must be a string", {}),
        ("\ud800", "has half of a character", {}),
        (QUERY, "no instruction", {"instruction": "Find cats"}),
    ]:
        with pytest.raises(InvalidRequestError, match=reason):
            await engine.encode_query(query, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"documents\[1\] is a query's embedding"):
        await engine.score(QUERY, ["a", rows])
    none = QueryRows(rows.rows[:0], tokens=3, truncated=False, fingerprint=rows.fingerprint)
    assert (await engine.score(none, DOCUMENTS)).scores == [0.0] * len(DOCUMENTS)
    wrong = QueryRows(rows.rows[:, :3], tokens=1, truncated=False, fingerprint=rows.fingerprint)
    with pytest.raises(InvalidRequestError, match="has the shape"):
        await engine.score(wrong, DOCUMENTS)
    with pytest.raises(RequestTimeoutError):
        await engine.encode_query(QUERY, timeout=0)


@pytest.mark.parametrize("build", [cross_encoders.bert, language_models.jina_reranker_v3])
async def test_models_that_read_query_and_document_together_refuse_it(
    engines: Engines, build: Any, checkpoints: SharedCheckpoints
) -> None:
    engine = await engines(EngineConfig(model=checkpoints(build), dtype="float32", threads=1))
    with pytest.raises(InvalidRequestError, match="reads query and document together"):
        await engine.encode_query(QUERY)
    rows = QueryRows(torch.zeros(2, 4), tokens=2, truncated=False, fingerprint="f")
    with pytest.raises(InvalidRequestError, match="reads query and document together"):
        await engine.score(rows, DOCUMENTS)
