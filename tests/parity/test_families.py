"""Every family of models scores as the library that its model card uses, in whatever form its weights are
stored. A family's tests share engines and float32 scores. `make test` runs the main families."""

from typing import Any

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, EngineConfig
from maxsimd.engine.checkpoint.detect import kind_of
from maxsimd.engine.checkpoint.files import read_files
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.native_bfloat16 import needs_native_bfloat16
from tests.parity import references
from tests.parity.families import FAMILIES, FORMS, Family
from tests.parity.selection import families, rank_alike

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Rounding is tried by default with one family of each kind of attention.
ROUNDED = {"GTE-ModernColBERT", "DeBERTa-v2", "Qwen3-Reranker", "monoT5", "SPLADE", "FP8 in blocks"}

# Not where tokens are merged: which ones are can hang on the last bit of a distance. All embeddings of bge-m3
# are compared in test_bge_m3.py.
_OTHERS = ("native multi-vector, token pooling", "bge-m3, multi-vector")
_APART = [family for family in FAMILIES if family.kind in ("bi-encoder", "late-interaction")]
EMBEDDING = [family for family in _APART if family.name not in _OTHERS]
# Short convolutions hold no state between chunks, so that texts longer than the budget are cut to it.
CAUSAL = [family for family in FAMILIES if family.causal and family.packed and family.name != "LFM2-ColBERT"]


@pytest.fixture
def path(family: Family, checkpoints: SharedCheckpoints) -> str:
    return checkpoints(family.build)


def _config(family: Family, path: str, **settings: Any) -> EngineConfig:
    return EngineConfig(model=path, **{"dtype": "float32", **family.settings, **settings})


@families([*FAMILIES, *FORMS])
async def test_scores_equal_library(family: Family, path: str, engines: Engines, pairs: list[Pair]) -> None:
    pairs = pairs[:4]
    ours = await engines.scores(_config(family, path), pairs)
    engine = await engines(_config(family, path))
    assert (engine.device_model.not_packed is None) == family.packed
    assert (engine.model.causal, engine.model.score_type.value) == (family.causal, family.kind)
    assert bool(engine.model.stored_as) == (family in FORMS)
    if family not in FORMS:
        assert family.kind in kind_of(read_files(path, None).architecture).kinds, "it is in the table"
    texts = [pair.query for pair in pairs], [pair.document for pair in pairs]
    reference = family.reference(family.weights(path), *texts)
    least = min(0.005, 0.1 * float(np.abs(reference).max()))  # probabilities may all be small
    assert reference.std() > least, "the checkpoint must tell pairs apart, or this test shows nothing"
    tolerance = 1e-5 if family.kind == "bi-encoder" else 1e-4
    np.testing.assert_allclose(ours, reference, atol=tolerance, rtol=0)


@families(EMBEDDING, {"GTE-ModernColBERT", "EmbeddingGemma", "Qwen3-Embedding"})
async def test_vectors_equal_library(family: Family, path: str, engines: Engines, pairs: list[Pair]) -> None:
    engine = await engines(_config(family, path))
    embed: Any = engine.embed if family.kind == "bi-encoder" else engine.embed_tokens
    for role in ("query", "document"):
        texts = [getattr(pair, role) for pair in pairs[:4]]
        ours = (await embed(texts, input_type=role, truncation=CUT_LONG)).embeddings
        for mine, theirs in zip(ours, _embeddings(family, path, texts, role), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=0)


def _embeddings(family: Family, path: str, texts: list[str], role: str) -> list[references.Scores]:
    if family.embeddings is not None:
        return family.embeddings(path, texts, role)
    kinds = {"bi-encoder": SentenceTransformer, "late-interaction": MultiVectorEncoder}
    if family.settings.get("score_type") == "late-interaction":
        model = references.token_states(path)
    else:
        model = references.loaded(kinds[family.kind], family.weights(path))
    return references.embeddings(model, texts, role, family.settings.get(f"{role}_prompt"))


@needs_native_bfloat16
@families([*FAMILIES, *FORMS], ROUNDED)
async def test_bfloat16_ranks_alike(family: Family, path: str, engines: Engines, pairs: list[Pair]) -> None:
    exact = await engines.scores(_config(family, path), pairs[:60])
    rounded = await engines.scores(_config(family, path, dtype="bfloat16"), pairs[:60])
    rank_alike(exact, rounded, 2**-6)


@families(CAUSAL, {"Qwen3-Reranker", "Qwen3-Embedding"})
async def test_budgets_keep_scores(family: Family, path: str, engines: Engines, pairs: list[Pair]) -> None:
    whole = await engines.scores(_config(family, path), pairs[:4])
    cut = await engines.scores(_config(family, path, max_batch_tokens=61), pairs[:4])
    np.testing.assert_allclose(cut, whole, atol=1e-5, rtol=1e-5)
