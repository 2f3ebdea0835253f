"""Every family of models scores as the library that its model card uses."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from tests.parity import references
from tests.parity.families import FAMILIES, Family

Build = Callable[[Family], str]


@pytest.fixture(scope="module")
def build(folder: Path) -> Build:
    """Builds a family's checkpoint once."""
    return cache(lambda family: family.build(folder / "families" / str(FAMILIES.index(family))))


@pytest.fixture(params=FAMILIES, ids=lambda family: f"{family.kind}: {family.name}")
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


async def _score(family: Family, path: str, pairs: list[Pair], **settings: object) -> np.ndarray:
    config = EngineConfig(model=path, **{**family.settings, **settings})  # type: ignore[arg-type]
    async with Engine(config) as engine:
        result = await engine.score(
            [pair.query for pair in pairs], [pair.document for pair in pairs], truncation=CUT_LONG
        )
    return np.array(result.scores)


async def test_scores_equal_the_reference(family: Family, build: Build, pairs: list[Pair]) -> None:
    path = build(family)
    ours = await _score(family, path, pairs[:100], dtype="float32")
    texts = [pair.query for pair in pairs[:100]], [pair.document for pair in pairs[:100]]
    reference = family.reference(family.weights(path), *texts)
    assert reference.std() > 0.01, "the checkpoint must tell pairs apart, or this test shows nothing"
    tolerance = 1e-5 if family.kind == "bi-encoder" else 1e-4
    np.testing.assert_allclose(ours, reference, atol=tolerance, rtol=0)


# Not where tokens are merged: which ones are can hang on the last bit of a distance.
EMBEDDING = [
    family for family in FAMILIES if family.kind != "cross-encoder" and "token pooling" not in family.name
]


@pytest.mark.parametrize("role", ["query", "document"])
@pytest.mark.parametrize("family", EMBEDDING, ids=lambda family: f"{family.kind}: {family.name}")
async def test_embeddings_equal_the_reference(
    family: Family, build: Build, pairs: list[Pair], role: str
) -> None:
    path = build(family)
    texts = [pair.query if role == "query" else pair.document for pair in pairs[:25]]
    async with Engine(EngineConfig(model=path, dtype="float32", **family.settings)) as engine:
        embed = engine.embed if family.kind == "bi-encoder" else engine.embed_tokens
        ours = (await embed(texts, input_type=role, truncation=CUT_LONG)).embeddings  # type: ignore[arg-type]
    kinds = {"bi-encoder": SentenceTransformer, "late-interaction": MultiVectorEncoder}
    if family.settings.get("score_type") == "late-interaction":
        model = references.token_states(path)
    else:
        model = kinds[family.kind](family.weights(path), device="cpu")
    reference = references.embeddings(model, texts, role, family.settings.get(f"{role}_prompt"))
    for mine, theirs in zip(ours, reference, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=0)


async def test_bfloat16_ranks_as_float32_does(family: Family, build: Build, pairs: list[Pair]) -> None:
    path = build(family)
    exact = await _score(family, path, pairs[:100], dtype="float32")
    rounded = await _score(family, path, pairs[:100], dtype="bfloat16")
    assert spearmanr(exact, rounded).statistic >= 0.995


async def test_it_is_packed_where_it_can_be(family: Family, build: Build) -> None:
    config = EngineConfig(model=build(family), dtype="float32", **family.settings)
    async with Engine(config) as engine:
        assert (engine.on_device.prepared.not_packed is None) == family.packed
        assert engine.model.causal == family.causal
        assert engine.model.score_type.value == family.kind


CAUSAL = [family for family in FAMILIES if family.causal and family.packed]


@pytest.mark.parametrize("family", CAUSAL, ids=lambda family: f"{family.kind}: {family.name}")
async def test_scores_do_not_depend_on_the_budget(family: Family, build: Build, pairs: list[Pair]) -> None:
    path = build(family)
    whole = await _score(family, path, pairs[:20], dtype="float32", max_batch_tokens=4096)
    cut = await _score(family, path, pairs[:20], dtype="float32", max_batch_tokens=61)
    np.testing.assert_allclose(cut, whole, atol=1e-5, rtol=1e-5)
