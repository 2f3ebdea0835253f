"""Bi-encoders embed and score as sentence-transformers' SentenceTransformer does."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, EngineConfig
from maxsimd.engine.checkpoint.embedded import embedded_model_path
from tests.engines import Engines
from tests.native_bfloat16 import needs_native_bfloat16
from tests.parity.references import loaded

pytestmark = pytest.mark.asyncio(loop_scope="module")


# The embedded model is large for a test: `make test` has its embeddings of tokens alone, in test_families.
@pytest.fixture(params=[pytest.param("minilm", marks=pytest.mark.exhaustive), "qwen3_embedding"])
def checkpoint(request: pytest.FixtureRequest) -> str:
    if request.param == "minilm":
        return embedded_model_path()
    return str(request.getfixturevalue(request.param))


def _config(checkpoint: str, dtype: Any) -> EngineConfig:
    return EngineConfig(model=checkpoint, score_type="bi-encoder", dtype=dtype)


@pytest.mark.parametrize("input_type", ["query", "document"])
async def test_embeddings_equal_encode(
    checkpoint: str, engines: Engines, pairs: list[Pair], input_type: Any
) -> None:
    texts = [pair.document for pair in pairs[:8]]
    engine = await engines(_config(checkpoint, "float32"))
    result = await engine.embed(texts, input_type=input_type, truncation=CUT_LONG)
    short = await engine.embed(texts, input_type=input_type, dimensions=32, truncation=CUT_LONG)
    model = loaded(SentenceTransformer, checkpoint)
    encode = model.encode_query if input_type == "query" else model.encode_document
    np.testing.assert_allclose(result.embeddings, encode(texts), atol=1e-5)
    reference = encode(texts, truncate_dim=32, normalize_embeddings=True)
    np.testing.assert_allclose(short.embeddings, reference, atol=1e-5)


@needs_native_bfloat16
async def test_bfloat16_ranks_as_float32_does(checkpoint: str, engines: Engines, pairs: list[Pair]) -> None:
    exact, rounded = [
        await engines.scores(_config(checkpoint, dtype), pairs[:40]) for dtype in ("float32", "bfloat16")
    ]
    assert spearmanr(exact, rounded).statistic >= 0.999
