"""Bi-encoders embed and score as sentence-transformers' SentenceTransformer does."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.checkpoint.embedded import embedded_model_path


@pytest.fixture(params=["minilm", "qwen3_embedding"])
def checkpoint(request: pytest.FixtureRequest) -> str:
    if request.param == "minilm":
        return embedded_model_path()
    return str(request.getfixturevalue(request.param))


async def test_scores_equal_cosine_in_float32(checkpoint: str, pairs: list[Pair]) -> None:
    queries, documents = [pair.query for pair in pairs], [pair.document for pair in pairs]
    async with Engine(EngineConfig(model=checkpoint, score_type="bi-encoder", dtype="float32")) as engine:
        result = await engine.score(queries, documents, truncation=CUT_LONG)
    model = SentenceTransformer(checkpoint, device="cpu")
    reference = model.similarity_pairwise(model.encode_query(queries), model.encode_document(documents))
    np.testing.assert_allclose(result.scores, reference.numpy(), atol=1e-5)


@pytest.mark.parametrize("input_type", ["query", "document"])
async def test_embeddings_equal_encode(checkpoint: str, pairs: list[Pair], input_type: str) -> None:
    texts = [pair.document for pair in pairs[:60]]
    async with Engine(EngineConfig(model=checkpoint, score_type="bi-encoder", dtype="float32")) as engine:
        result = await engine.embed(texts, input_type=input_type, truncation=CUT_LONG)
        short = await engine.embed(texts, input_type=input_type, dimensions=32, truncation=CUT_LONG)
    model = SentenceTransformer(checkpoint, device="cpu")
    encode = model.encode_query if input_type == "query" else model.encode_document
    np.testing.assert_allclose(result.embeddings, encode(texts), atol=1e-5)
    reference = encode(texts, truncate_dim=32, normalize_embeddings=True)
    np.testing.assert_allclose(short.embeddings, reference, atol=1e-5)


async def test_bfloat16_ranks_as_float32_does(checkpoint: str, pairs: list[Pair]) -> None:
    scores = {}
    for dtype in ("float32", "bfloat16"):
        async with Engine(EngineConfig(model=checkpoint, score_type="bi-encoder", dtype=dtype)) as engine:
            result = await engine.score(
                [pair.query for pair in pairs], [pair.document for pair in pairs], truncation=CUT_LONG
            )
        scores[dtype] = result.scores
    assert spearmanr(scores["float32"], scores["bfloat16"]).statistic >= 0.999
