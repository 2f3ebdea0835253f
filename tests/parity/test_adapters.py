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
from tests.checkpoints import language_models, vision_language
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


@pytest.mark.asyncio(loop_scope="module")
async def test_a_folder_with_weights_of_its_own_is_no_adapter(
    checkpoints: SharedCheckpoints, engines: Engines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(checkpoints(vision_language.colqwen2_5_adapter))
    both = Path(shutil.copytree(folder / "merged", tmp_path / "both"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder / name, both / name)
    scores = []
    for each in (both, folder / "merged"):
        engine = await engines(EngineConfig(model=str(each), dtype="float32"))
        scores.append((await engine.score("What is it?", PAGES, cache="bypass")).scores)
    assert scores[0] == scores[1]
    assert "has weights of its own; the adapter beside them is not used" in caplog.text


@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_without_modules_is_used_as_its_base(
    checkpoints: SharedCheckpoints, engines: Engines, tmp_path: Path
) -> None:
    folder = Path(checkpoints(vision_language.colqwen2_5_adapter))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder / name, tmp_path / name)
    scores = []
    for each in (tmp_path, folder):
        engine = await engines(EngineConfig(model=str(each), dtype="float32"))
        scores.append((await engine.score("What is it?", PAGES, cache="bypass")).scores)
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)


def test_an_adapter_of_weights_that_two_layers_share_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tied = language_models.qwen3_reranker(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    embeddings = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    found = {"lora_A": torch.zeros(4, embeddings.shape[1]), "lora_B": torch.zeros(embeddings.shape[0], 4)}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(
        {f"base_model.model.lm_head.{name}.weight": each for name, each in found.items()},
        adapter / "adapter_model.safetensors",
    )
    said = {"peft_type": "LORA", "base_model_name_or_path": str(tied), "r": 4, "lora_alpha": 8}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelLoadError, match="is for lm_head, whose weights are also another layer's"):
        load_model(EngineConfig(model=str(adapter), dtype="float32"), CPU)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (settings(peft_type="IA3"), "is no LoRA; merge it into its base"),
        (settings(use_dora=True), r"lacks matrices: model.layers.0.mlp.down_proj, "),
        (settings(modules_to_save=["score"]), "has no tensors of its modules_to_save, score"),
        (settings(target_parameters=["w"]), "sets target_parameters, with which it cannot be added here"),
        (settings(lora_bias=True), "sets lora_bias, with which it"),
        (settings(rank_pattern={"q_proj": 3}), "says that its rank is 3, which its matrices have not"),
        (settings(rank_pattern={"(": 3}), "has patterns that cannot be read"),
        (settings(alora_invocation_tokens=[1]), "sets alora_invocation_tokens, with which it"),
        (settings(layer_replication=[[0, 2]]), "sets layer_replication, with which it"),
        (settings(init_lora_weights="pissa"), "sets init_lora_weights, with which it"),
        (settings(bias="some"), "sets bias, with which it cannot be added here"),
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
