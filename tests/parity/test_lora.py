"""LoRA folders score as their bases with the weights that the formulas give."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from tests.checkpoints import adapters
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.selection import with_default

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "patterns": {"rank_pattern": {"value": 6}, "alpha_pattern": {"query": 3}},
    "DoRA": {"use_dora": True},
    "a classifier and a bias": {"modules_to_save": ["classifier", "score"], "bias": "all"},
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("named", with_default(SETTINGS, {*SETTINGS} - {"plain"}))
async def test_an_adapter_scores_as_its_formula(
    named: str, checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    await _compare(checkpoints(partial(adapters.bert, **SETTINGS[named])), engines, pairs)


@pytest.mark.asyncio(loop_scope="module")
async def test_transposed_layers_are_changed_transposed(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    await _compare(checkpoints(adapters.gpt2), engines, pairs)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_base_without_a_classifier_becomes_one(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair], tmp_path: Path
) -> None:
    path = Path(checkpoints(partial(adapters.bert, **SETTINGS["a classifier and a bias"])))
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    adapters.without_classifier(path, adapter, base)
    ours, merged = [
        await engines.scores(EngineConfig(model=str(each), dtype="float32"), pairs[:8])
        for each in (adapter, path.parent / "merged")
    ]
    np.testing.assert_allclose(ours, merged, atol=1e-5)
    found = load_file(adapter / "adapter_model.safetensors")
    del found["base_model.model.classifier.bias"]
    save_file(found, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing: classifier.bias"):
        load_model(EngineConfig(model=str(adapter), dtype="float32"), torch.device("cpu"))


async def _compare(path: str, engines: Engines, pairs: list[Pair]) -> None:
    folder = Path(path)
    adapted, merged, base = [
        await engines.scores(EngineConfig(model=str(each), dtype="float32"), pairs[:8])
        for each in (folder, folder.parent / "merged", folder.parent / "base")
    ]
    np.testing.assert_allclose(adapted, merged, atol=1e-5)
    assert np.abs(adapted - base).max() > 0.01


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "classifier.weight",
            (2, 128),
            r"has \[2, 128\] in the stead of classifier.weight, which is \[1, 128\]",
        ),
        ("classifier.other", (2,), "in the stead of classifier.other, which is None"),
        ("bert.embeddings.LayerNorm.weight", (128,), "has a tensor .*LayerNorm.weight, which is not of LoRA"),
    ],
)
def test_a_tensor_that_replaces_none_is_refused(
    name: str, shape: tuple[int, ...], message: str, checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    build = partial(adapters.bert, **SETTINGS["a classifier and a bias"])
    folder = Path(checkpoints(build))
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    found = load_file(folder / "adapter_model.safetensors")
    found[f"base_model.model.{name}"] = torch.ones(shape)
    save_file(found, changed / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(model=str(changed), dtype="float32"), torch.device("cpu"))
