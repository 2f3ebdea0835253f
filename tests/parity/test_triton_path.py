"""Whole engines on the kernels of the GPU path, interpreted on a CPU, against engines on plain torch."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.device import load
from tests.checkpoints import cross_encoders, late_interaction
from tests.checkpoints.shared import SharedCheckpoints
from tests.unit.engine.ops.interpreted import run_interpreted

pytest.importorskip("triton")

DOCUMENTS = 2

PLAIN = EngineConfig(dtype="float32", attention="torch", maxsim="reference", kernels="torch")
TRITON = EngineConfig(dtype="float32", attention="triton", maxsim="triton", kernels="torch")


def compare_late_interaction(path: str, cache_mb: str, precision: Any) -> None:
    documents = [pair.document[:40] for pair in docstring_pairs()[:DOCUMENTS]]
    more: dict[str, Any] = {"model": path, "cache_mb": int(cache_mb), "cache_precision": precision}
    plain, ours = (asyncio.run(_score_twice(replace(each, **more), documents)) for each in (PLAIN, TRITON))
    np.testing.assert_allclose(ours, plain, atol=1e-4 if precision != "int8" else 2e-3)


def compare_with_a_slab(path: str, precision: Any) -> None:
    """Scores of new documents, and of the same in the slab."""
    opened: list[EmbeddingSlab] = []

    def open_slab(_: Any, model: LoadedModel, __: Any, device: Any, dtype: Any, int8: bool, ___: int) -> Any:
        dim = model.tasks[model.score_task].dim
        as_int8 = int8 and precision == "int8"
        opened.append(EmbeddingSlab(4096, dim, torch.int8 if as_int8 else dtype, device))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "open_slab", open_slab)
        compare_late_interaction(path, "8", precision)
    for slab in opened:
        assert slab.hits == len(slab) == DOCUMENTS
        assert slab.copied == 0


def compare_cross_encoder(path: str) -> None:
    """A causal one: pairs share a beginning, and steps of 64 tokens cut it and them."""
    documents = [pair.document[:200] for pair in docstring_pairs()[:5]]
    configs = [replace(config, model=path, max_batch_tokens=64) for config in (PLAIN, TRITON)]
    plain, ours = (asyncio.run(_score_twice(config, documents)) for config in configs)
    np.testing.assert_allclose(ours, plain, atol=1e-4)


async def _score_twice(config: EngineConfig, documents: list[str]) -> list[float]:
    async with Engine(config) as engine:
        assert engine.device_model.attention == ("triton" if config.attention == "triton" else "grouped")
        first = await engine.score("how is a file opened", documents, truncation=CUT_LONG)
        again = await engine.score("how is a file opened", documents, truncation=CUT_LONG)
        assert again.scores == pytest.approx(first.scores, abs=1e-5)
        return first.scores


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("compare", "build", "options"),
    [
        # Without a cache, with one, and with one in int8, whose rows are scored as they are.
        *[(compare_late_interaction, late_interaction.stanford, each)
          for each in (("0", "auto"), ("8", "float32"), ("8", "int8"))],
        *[(compare_with_a_slab, late_interaction.stanford, (each,)) for each in ("auto", "int8")],
        (compare_cross_encoder, cross_encoders.qwen3, ()),
    ],
)  # fmt: skip
def test_triton_scores_alike(compare: Any, build: Any, options: Any, checkpoints: SharedCheckpoints) -> None:
    run_interpreted(compare, checkpoints(build), *options)
