"""Late interaction scores as sentence-transformers' MultiVectorEncoder does, by what the checkpoint says of
markers, query expansion, lengths and skipped tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.checkpoint.embedded import embedded_model_path
from tests.checkpoints import late_interaction
from tests.engines import Engines
from tests.parity import references

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The embedded model is large for a test: `make test` has it in test_families, as "any encoder".
CHECKPOINTS = [
    "stanford_colbert",
    "stanford_colbert_attending",
    "native_multi_vector",
    pytest.param("minilm", marks=pytest.mark.exhaustive),
]


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "minilm" else str(request.getfixturevalue(request.param))


def _reference(checkpoint: str | None) -> MultiVectorEncoder:
    if checkpoint is not None:
        return references.loaded(MultiVectorEncoder, checkpoint)
    # The embedded model has no projection: its token states are compared as they are, normalised.
    return references.token_states(embedded_model_path())


async def test_scores_equal_maxsim_in_float32(
    checkpoint: str | None, engines: Engines, pairs: list[Pair]
) -> None:
    pairs = pairs[:100]
    scores = await engines.scores(EngineConfig(model=checkpoint, dtype="float32"), pairs)
    queries, documents = [pair.query for pair in pairs], [pair.document for pair in pairs]
    model = _reference(checkpoint)
    reference = model.similarity_pairwise(model.encode_query(queries), model.encode_document(documents))
    np.testing.assert_allclose(scores, reference.numpy(), atol=1e-4)


async def test_one_query_against_many_equals_maxsim(
    checkpoint: str | None, engines: Engines, pairs: list[Pair]
) -> None:
    documents = [pair.document for pair in pairs[:20]]
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    await engine.clear_cache()
    result = await engine.score(pairs[3].query, documents, truncation=CUT_LONG)
    assert result.usage.cached_documents == 0
    model = _reference(checkpoint)
    reference = model.similarity(model.encode_query([pairs[3].query]), model.encode_document(documents))
    np.testing.assert_allclose(result.scores, reference[0].numpy(), atol=1e-4)


@pytest.mark.parametrize("input_type", ["query", "document"])
async def test_token_embeddings_equal_encode(
    checkpoint: str | None, engines: Engines, pairs: list[Pair], input_type: Any
) -> None:
    texts = [pair.query for pair in pairs[:10]] + ["What, then, is the point?!", "the"]
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    result = await engine.embed_tokens(texts, input_type=input_type, truncation=CUT_LONG)
    model = _reference(checkpoint)
    encode = model.encode_query if input_type == "query" else model.encode_document
    for ours, reference in zip(result.embeddings, encode(texts), strict=True):
        np.testing.assert_allclose(ours, reference.numpy(), atol=1e-5)


async def test_bfloat16_ranks_as_float32_does(
    checkpoint: str | None, engines: Engines, pairs: list[Pair]
) -> None:
    pairs = pairs[:100]
    exact, rounded = [
        await engines.scores(EngineConfig(model=checkpoint, dtype=dtype), pairs)
        for dtype in ("float32", "bfloat16")
    ]
    # Scores of a model with random weights lie close together: rounding changes them by 3% of their spread.
    assert spearmanr(exact, rounded).statistic >= 0.998


async def test_an_expanded_query_has_the_length_of_its_checkpoint(stanford_colbert: str) -> None:
    async with Engine(EngineConfig(model=stanford_colbert)) as engine:
        short = await engine.embed_tokens(["why"], input_type="query")
        long = await engine.embed_tokens(["why " * 200], input_type="query")
    assert short.embeddings[0].shape == long.embeddings[0].shape == (32, 32)


@pytest.mark.parametrize("maxsim", ["reference", "tiled"])
async def test_maxsim_backends_agree(stanford_colbert: str, pairs: list[Pair], maxsim: str) -> None:
    documents = [pair.document for pair in pairs[:15]]
    results = []
    for backend in (maxsim, "auto"):
        async with Engine(EngineConfig(model=stanford_colbert, dtype="float32", maxsim=backend)) as engine:
            results.append((await engine.score("what is it for", documents, truncation=CUT_LONG)).scores)
    np.testing.assert_allclose(results[0], results[1], atol=1e-4)


async def test_token_pooling_merges_the_tokens_of_documents_alone(
    stanford_colbert: str, pairs: list[Pair]
) -> None:
    queries, documents = [pair.query for pair in pairs[:20]], [pair.document for pair in pairs[:20]]
    config = EngineConfig(model=stanford_colbert, dtype="float32", doc_token_pooling=2)
    async with Engine(config) as engine:
        result = await engine.score(queries, documents, truncation=CUT_LONG)
        vectors = await engine.embed_tokens(documents[:5], input_type="document", truncation=CUT_LONG)
    model = references.loaded(MultiVectorEncoder, stanford_colbert)
    pooled = model.encode_document(documents, token_pooling=HierarchicalTokenPooling(2.0))
    reference = model.similarity_pairwise(model.encode_query(queries), pooled)
    np.testing.assert_allclose(result.scores, reference.numpy(), atol=1e-4)
    assert [len(matrix) for matrix in vectors.embeddings] == [len(matrix) for matrix in pooled[:5]]


async def test_dimensions_keep_the_first_columns_in_scores_and_vectors(
    stanford_colbert: str, pairs: list[Pair]
) -> None:
    """Matryoshka, as jina-colbert-v2 is trained for 128, 96 and 64."""
    documents = [pair.document for pair in pairs[:15]]
    async with Engine(EngineConfig(model=stanford_colbert, dtype="float32", dimensions=16)) as engine:
        scores = (await engine.score(pairs[0].query, documents, truncation=CUT_LONG)).scores
        vectors = (await engine.embed_tokens([pairs[0].query], input_type="query")).embeddings[0]
    model = references.loaded(MultiVectorEncoder, stanford_colbert)

    def first(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(rows[:, :16], dim=-1)

    query = first(model.encode_query([pairs[0].query])[0])
    np.testing.assert_allclose(vectors, query.numpy(), atol=1e-5)
    reference = [float((query @ first(rows).T).amax(1).sum()) for rows in model.encode_document(documents)]
    np.testing.assert_allclose(scores, reference, atol=1e-4)


async def test_a_mask_that_keeps_some_tokens_of_documents_is_followed(
    tmp_path: Path, pairs: list[Pair]
) -> None:
    """As ColPali-like models keep only the tokens of pictures; here every other token of the vocabulary."""
    folder = late_interaction.native(tmp_path)
    settings = Path(folder) / "2_MultiVectorMask" / "config.json"
    kept = {"keep_only_token_ids": list(range(0, 30522, 2))}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | kept))
    queries, documents = [pair.query for pair in pairs[:15]], [pair.document for pair in pairs[:15]]
    async with Engine(EngineConfig(model=folder, dtype="float32")) as engine:
        result = await engine.score(queries, documents, truncation=CUT_LONG)
    model = MultiVectorEncoder(folder, device="cpu")
    reference = model.similarity_pairwise(model.encode_query(queries), model.encode_document(documents))
    np.testing.assert_allclose(result.scores, reference.numpy(), atol=1e-4)
