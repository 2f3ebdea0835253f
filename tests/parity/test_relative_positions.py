"""Every shape of relative positions that DeBERTa-v2's config names is run packed, as its library has it."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from tests.checkpoints import cross_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references
from tests.parity.selection import with_default

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHAPES: dict[str, dict[str, Any]] = {
    "deberta-v2-xlarge: a convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "projections of positions apart": {"share_att_key": False},
    "queries and positions alone": {"pos_att_type": ["c2p"]},
    "keys and positions alone": {"pos_att_type": ["p2c"], "share_att_key": False},
    "no buckets": {"position_buckets": -1, "max_relative_positions": 40},
    "positions not normalised": {"norm_rel_ebd": "none"},
    "absolute positions alone": {"relative_attention": False, "position_biased_input": True},
    "both kinds of positions, and types": {"position_biased_input": True, "type_vocab_size": 2},
}


@pytest.mark.parametrize("kernels", with_default(["auto", "torch"], ["auto"]))
@pytest.mark.parametrize("shape", SHAPES)
async def test_scores_equal_those_of_sentence_transformers(
    shape: str, kernels: Any, checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    path = checkpoints(partial(cross_encoders.deberta_v2, changes=tuple(SHAPES[shape].items())))
    config = EngineConfig(model=path, dtype="float32", kernels=kernels)
    engine = await engines(config)
    assert engine.device_model.prepared.not_packed is None
    ours = await engines.scores(config, pairs[:20])
    queries, documents = [pair.query for pair in pairs[:20]], [pair.document for pair in pairs[:20]]
    reference = references.cross_encoder(path, queries, documents)
    assert reference.std() > 0.005, "the checkpoint must tell pairs apart, or this test shows nothing"
    np.testing.assert_allclose(ours, reference, atol=1e-4, rtol=0)
