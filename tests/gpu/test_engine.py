"""Whole engines on a GPU: the scores of the CPU, and no waiting within a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.execution.cuda_graphs import GraphedRunner
from tests.checkpoints import bi_encoders, cross_encoders, late_interaction
from tests.checkpoints.shared import Build
from tests.parity.families import FAMILIES, Family

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


async def _score(config: EngineConfig, pairs: list[Pair]) -> np.ndarray:
    queries, documents = [pair.query for pair in pairs], [pair.document for pair in pairs]
    async with Engine(config) as engine:
        return np.array((await engine.score(queries, documents, truncation=CUT_LONG)).scores)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.kind}: {family.name}")
async def test_scores_equal_those_of_the_cpu(family: Family, tmp_path: Path, pairs: list[Pair]) -> None:
    config = EngineConfig(model=family.build(tmp_path / "model"), **family.settings)  # type: ignore[arg-type]
    exact = await _score(replace(config, device="cpu", dtype="float32"), pairs[:60])
    ours = await _score(replace(config, device="cuda", dtype="float32"), pairs[:60])
    np.testing.assert_allclose(ours, exact, atol=1e-3 * max(1.0, np.abs(exact).max()), rtol=0)
    rounded = await _score(replace(config, device="cuda", dtype="bfloat16"), pairs[:60])
    assert spearmanr(exact, rounded).statistic >= 0.99


@pytest.mark.parametrize(
    ("build", "more"),
    [
        *((late_interaction.stanford, more)
          for more in ({}, {"cache_mb": 0}, {"cache_precision": "int8"}, {"maxsim": "tiled"})),
        *((cross_encoders.bert, more) for more in ({}, {"attention": "triton"})),
        (cross_encoders.qwen3, {"max_batch_tokens": 512}), (bi_encoders.bge, {}),
    ],
)  # fmt: skip
async def test_no_step_waits(build: Build, more: Any, tmp_path: Path, pairs: list[Pair]) -> None:
    config = EngineConfig(model=build(tmp_path / "model"), device="cuda", **more)
    documents = [pair.document for pair in pairs[:50]]
    async with Engine(config) as engine:
        assert isinstance(engine.device_model.runner, GraphedRunner) or build is not cross_encoders.bert
        await engine.score("warm up", documents[:3], truncation=CUT_LONG)
        torch.cuda.set_sync_debug_mode("error")
        try:
            first = await engine.score(pairs[0].query, documents, truncation=CUT_LONG)
            again = await engine.score(pairs[0].query, documents, truncation=CUT_LONG)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert again.scores == pytest.approx(first.scores, abs=2e-2)


async def test_a_gpu_without_triton_scores_the_same(tmp_path: Path, pairs: list[Pair]) -> None:
    config = EngineConfig(model=late_interaction.stanford(tmp_path / "model"), device="cuda", dtype="float32")
    ours = await _score(replace(config, maxsim="tiled", attention="torch"), pairs[:40])
    np.testing.assert_allclose(ours, await _score(config, pairs[:40]), atol=1e-3)
