"""Weights that are stored in a form of their own score as what they stand for does in the library that the
model card uses."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.native_bfloat16 import needs_native_bfloat16
from tests.parity.families import Family
from tests.parity.selection import families
from tests.parity.stored_forms import FORMS

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The others differ in their blocks alone: test_gguf.py and test_quantized.py read those of every kind.
DEFAULT = {"bge-reranker-v2-m3, F16", "Qwen3-Embedding, Q8_0", "compressed-tensors, w4a16", "FP8 in blocks"}
every_form = families(FORMS, DEFAULT)


@pytest.fixture
def path(family: Family, checkpoints: SharedCheckpoints) -> str:
    return checkpoints(family.build)


def _config(family: Family, path: str, **settings: Any) -> EngineConfig:
    return EngineConfig(model=path, **{"dtype": "float32", **family.settings, **settings})


@every_form
async def test_scores_equal_the_reference(
    family: Family, path: str, engines: Engines, pairs: list[Pair]
) -> None:
    ours = await engines.scores(_config(family, path), pairs[:12])
    texts = [pair.query for pair in pairs[:12]], [pair.document for pair in pairs[:12]]
    reference = family.reference(family.weights(path), *texts)
    assert reference.std() > 0.005, "the checkpoint must tell pairs apart, or this test shows nothing"
    tolerance = 1e-5 if family.kind == "bi-encoder" else 1e-4
    np.testing.assert_allclose(ours, reference, atol=tolerance, rtol=0)


@needs_native_bfloat16
@every_form
async def test_bfloat16_ranks_as_float32_does(
    family: Family, path: str, engines: Engines, pairs: list[Pair]
) -> None:
    exact = await engines.scores(_config(family, path), pairs[:30])
    rounded = await engines.scores(_config(family, path, dtype="bfloat16"), pairs[:30])
    assert spearmanr(exact, rounded).statistic >= 0.98


@every_form
async def test_it_is_packed_where_it_can_be(family: Family, path: str, engines: Engines) -> None:
    engine = await engines(_config(family, path))
    assert (engine.device_model.prepared.not_packed is None) == family.packed
    assert engine.model.causal == family.causal
    assert engine.model.score_type.value == family.kind
    assert engine.model.stored_as
