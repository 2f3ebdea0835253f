"""Adapters score as the models that they are merged into, and those that cannot be added are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from maxsimd.engine import EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from tests.checkpoints import vision_language
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.test_visual import PAGES

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_scores_as_the_merged_model(
    checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    folder = Path(checkpoints(vision_language.colqwen2_5_adapter))
    documents = [*PAGES, "some text"]
    scores = []
    for each in (folder, folder / "merged", folder / "base"):
        engine = await engines(EngineConfig(model=str(each), dtype="float32"))
        scores.append((await engine.score("What is it?", documents, cache="bypass")).scores)
    adapted, merged, base = scores
    np.testing.assert_allclose(adapted, merged, atol=1e-4)
    assert np.abs(np.subtract(adapted, base)).max() > 0.1


def settings(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def no_json(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        found = load_file(folder / "adapter_model.safetensors")
        change(found)
        save_file(found, folder / "adapter_model.safetensors")

    return edit


def another_name(found: Tensors) -> None:
    for half in "AB":
        found["base_model.model.other.lora_" + half + ".weight"] = found[
            f"{LAYER}.lora_{half}.weight"
        ].clone()


def any_layer(found: Tensors) -> None:
    for half in "AB":
        found["base_model.model.q_proj.lora_" + half + ".weight"] = found[
            f"{LAYER}.lora_{half}.weight"
        ].clone()


def not_finite(found: Tensors) -> None:
    found[f"{LAYER}.lora_A.weight"][0, 0] = torch.inf


def half_of_a_layer(found: Tensors) -> None:
    del found[f"{LAYER}.lora_B.weight"]


def of_another_size(found: Tensors) -> None:
    found[f"{LAYER}.lora_B.weight"] = torch.zeros(7, 4)


def of_another_method(found: Tensors) -> None:
    found[f"{LAYER}.lora_magnitude_vector"] = torch.zeros(4)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (settings(peft_type="IA3"), "is no LoRA; merge it into its base"),
        (settings(use_dora=True), "sets use_dora, with which it cannot be added here"),
        (settings(modules_to_save=["score"]), "sets modules_to_save, with which it"),
        (settings(bias="all"), "sets bias, with which it cannot be added here"),
        (settings(r=8), "says that its rank is 8, which its matrices have not"),
        (settings(base_model_name_or_path="/nowhere"), "the base '/nowhere' of the adapter"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{"),
            "adapter_config.json of .* is not JSON",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (tensors(dict.clear), "lacks matrices: it has none"),
        (tensors(another_name), "is for other, which the model does not have"),
        (tensors(any_layer), r"may mean \S+q_proj or \S+q_proj"),
        (tensors(not_finite), "numbers that are not finite in its tensor .*lora_A"),
        (tensors(half_of_a_layer), r"lacks matrices: model.layers.0.self_attn.q_proj"),
        (tensors(of_another_size), r"has matrices \[7, 4\] and \[4, 128\] for .*, which is \[128, 128\]"),
        (tensors(of_another_method), "has a tensor .*lora_magnitude_vector, which is not of LoRA"),
    ],
)
def test_an_adapter_that_cannot_be_added_is_refused(
    checkpoints: SharedCheckpoints, tmp_path: Path, edit: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "adapter"
    ignored = shutil.ignore_patterns("merged", "base")
    shutil.copytree(checkpoints(vision_language.colqwen2_5_adapter), folder, ignore=ignored)
    edit(folder)
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(model=str(folder), dtype="float32"), CPU)
