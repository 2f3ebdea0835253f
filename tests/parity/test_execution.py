"""Every kernel in every precision ranks as float32 does."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint import gguf
from maxsimd.engine.inspection import inspect_model
from tests.checkpoints import gguf_models, t5
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.selection import rank_alike, with_default
from tests.unit.engine.ops.test_kernels import needs_kernels

on_one_loop = pytest.mark.asyncio(loop_scope="module")

CHECKPOINTS = ["bert_cross_encoder", "xlm_roberta_cross_encoder", "stanford_colbert", "qwen3_embedding"]
DEFAULT = ["bert_cross_encoder", "stanford_colbert", "qwen3_embedding"]


@pytest.fixture(params=with_default([None, *CHECKPOINTS], DEFAULT), ids=lambda name: name or "embedded")
def model(request: pytest.FixtureRequest) -> str | None:
    return None if request.param is None else str(request.getfixturevalue(request.param))


@on_one_loop
async def test_bfloat16_and_int8_rank_alike(model: str | None, engines: Engines, pairs: list[Pair]) -> None:
    pairs = pairs[:25]
    exact = await engines.scores(EngineConfig(model=model, dtype="float32"), pairs)
    rounded = await engines.scores(EngineConfig(model=model, dtype="bfloat16", kernels="torch"), pairs)
    rank_alike(np.array(exact), np.array(rounded), 2**-6)
    rounded = await engines.scores(EngineConfig(model=model, quantization="int8"), pairs)
    # The weights are random: rounding moves scores by some hundredths of their spread.
    assert spearmanr(exact, rounded).statistic >= 0.95
    usual = await engines.scores(EngineConfig(model=model), pairs)
    assert not np.array_equal(rounded, usual), "nothing was rounded"


@needs_kernels
@on_one_loop
@pytest.mark.parametrize("build", [t5.monot5, t5.mt5])
async def test_int8_of_t5_ranks_nearly_as_float32_does(
    build: Any, checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    path, pairs = checkpoints(build), pairs[:25]
    exact = await engines.scores(EngineConfig(model=path, dtype="float32"), pairs)
    config = EngineConfig(model=path, dtype="bfloat16", quantization="int8")
    assert spearmanr(exact, await engines.scores(config, pairs)).statistic >= 0.97


@needs_kernels
@on_one_loop
@pytest.mark.parametrize(
    ("build", "quantization"),
    [(partial(gguf_models.qwen3_reranker, kind="Q6_K"), "none"),
     (partial(gguf_models.qwen3_embedding, kind="Q4_K"), "int8")],
)  # fmt: skip
async def test_weights_in_blocks_give_the_bits_of_expanded_ones(
    build: Any, quantization: Any, checkpoints: SharedCheckpoints, pairs: list[Pair],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = EngineConfig(model=checkpoints(build), dtype="bfloat16", quantization=quantization)
    scores, sizes = [], []
    for stay in (gguf.can_stay, lambda *_: False):
        monkeypatch.setattr(gguf, "can_stay", stay)
        async with Engines() as engines:
            scores.append(await engines.scores(config, pairs[:9]))
        sizes.append(float(inspect_model(config)["weights"].split()[-2]))
    assert np.array_equal(*scores)
    assert sizes[0] < sizes[1] * (0.55 if quantization == "none" else 1)


def test_inspect_says_that_weights_are_int8() -> None:
    plain, small = (inspect_model(EngineConfig(quantization=kind)) for kind in ("none", "int8"))  # type: ignore[arg-type]
    assert "int8" in small["precision"]
    assert "int8" not in plain["precision"]
    sizes = [float(rows["weights"].split()[-2]) for rows in (plain, small)]
    # Linear layers have 10.6 million of the 22.7 million weights.
    bytes_before = 2 if "bfloat16" in plain["precision"] else 4
    assert sizes[0] - sizes[1] == pytest.approx(10.6 * (bytes_before - 1), abs=0.3)
