"""What is cached belongs to what made it: nothing is found that another checkpoint or option made."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.cache.fingerprint import ingredients
from maxsimd.engine.checkpoint import load_model
from tests.checkpoints import bi_encoders, late_interaction, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.unit.engine.cache.test_fingerprint_parts import CHANGES

# Precisions are options like others here, not the machine's choice.
USUAL: dict[str, Any] = {"dtype": "float32", "cache_precision": "float32"}

# Options that each change an ingredient.
BY_OPTIONS: dict[str, Any] = {
    "doc_token_pooling": 2.0,
    "document_prompt": "passage: ",
    "max_model_len": 100,
    "dimensions": 16,
}
# Options that leave a document's embedding as it is, with other values than the usual.
OF_NO_CONCERN: dict[str, Any] = {
    "query_prompt": "query: ",
    "window_overlap": 3,
    "max_batch_tokens": 999,
    "max_batch_sequences": 99,
    "max_queued_tokens": 99_999,
    "max_wait_seconds": 99.0,
    "step_timeout_seconds": 99.0,
    "max_request_tokens": 99_999,
    "max_vectors": 99,
    "steps_in_flight": 1,
    "maxsim": "reference",
    "cuda_graphs": "off",
    "prefix_sharing": "off",
    "threads": 1,
    "tokenizer_threads": 1,
    "calibration": "a file",
    "cache_mb": 1,
    "cache_by_tenant": True,
    "device_cache_mb": 1,
    "cache_disk_mb": 99,
    "allow_pickle": True,
    "trust_remote_code": True,
    "offline": True,
}
# Options that are ingredients themselves, as test_fingerprint_parts has them.
INGREDIENTS = {"dtype", "cache_precision", "quantization", "kernels", "attention", "packing"}
# Options whose effect shows in the loaded model, and those that only models without cached documents take.
SEEN_IN_THE_MODEL = {
    *("model", "revision", "score_type", "device", "instruction", "score_template", "cutoff_layer"),
    *("hybrid_weights", "compress_ratio", "compress_layers", "score_label"),
}


def made_of(folder: Path | str, **options: Any) -> dict[str, bytes]:
    """The ingredients that an engine knows when it opens its cache."""
    config = EngineConfig(model=str(folder), **(USUAL | options))
    return ingredients(load_model(config, torch.device("cpu")), config, torch.float32, "float32")


def changed(one: dict[str, bytes], other: dict[str, bytes]) -> set[str]:
    return {name for name in one if one[name] != other[name]}


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def add_to(folder: Path, tensor: str) -> None:
    """Another number at the end of one tensor."""
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].view(-1)[-1] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_options_change_their_ingredient_or_none(stanford_colbert: str) -> None:
    """A new option needs an entry in a table above, and a new ingredient one in test_fingerprint_parts."""
    usual = made_of(stanford_colbert)
    differs = changed(usual, made_of(stanford_colbert, **BY_OPTIONS))
    assert differs >= {"token pooling", "prompt", "model length", "dimensions"}
    assert changed(usual, made_of(stanford_colbert, **OF_NO_CONCERN)) == set()
    options = {field.name for field in dataclasses.fields(EngineConfig)}
    in_tables = BY_OPTIONS.keys() | OF_NO_CONCERN.keys() | INGREDIENTS | SEEN_IN_THE_MODEL
    assert options == in_tables | {"cache_dir"}
    of_pictures = {"pictures", "tower settings", "tower weights"}
    assert set(usual) == {name for name, *_ in CHANGES} | of_pictures | {"device", "versions"}


def test_how_pictures_are_read_counts(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    usual = made_of(checkpoints(visual.colpali))
    folder = checkpoints.copy(visual.colpali, tmp_path / "copy")
    edit(folder / "processor_config.json", lambda one: one["image_processor"].update(image_mean=[0.4] * 3))
    edit(folder / "config.json", lambda one: one["vlm_config"]["vision_config"].update(layer_norm_eps=1e-3))
    add_to(folder, "vlm.multi_modal_projector.linear.bias")
    assert changed(usual, made_of(folder)) == {"pictures", "tower settings", "tower weights"}


def test_each_block_of_a_tensor_counts(
    checkpoints: SharedCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxsimd.engine.cache.fingerprint._BLOCK", 20_000)
    config = EngineConfig(model=checkpoints(bi_encoders.gte), dtype="float32")
    model = load_model(config, torch.device("cpu"))
    weight = model.backbone.get_parameter("encoder.layer.0.output.dense.weight").data.view(-1)
    found = set()
    for place in range(0, len(weight), len(weight) // 3):
        found.add(ingredients(model, config, torch.float32, "float32")["weights"])
        weight[place] += 1
    assert len(found) == 4


async def test_an_engine_finds_what_a_copy_of_its_checkpoint_cached(
    checkpoints: SharedCheckpoints, tmp_path: Path, pairs: list[Pair]
) -> None:
    documents = [pair.document[:60] for pair in pairs[:5]]

    async def run(checkpoint: Path | str) -> tuple[int, np.ndarray]:
        """How many documents were found, and their scores, which are those of documents just encoded."""
        config = EngineConfig(model=str(checkpoint), cache_dir=str(tmp_path / "cache"), **USUAL)
        async with Engine(config) as engine:
            result = await engine.score("how is a file read", documents, truncation=CUT_LONG)
            new = await engine.score("how is a file read", documents, truncation=CUT_LONG, cache="bypass")
        np.testing.assert_allclose(result.scores, new.scores, atol=1e-5)
        return result.usage.cached_documents, np.array(result.scores)

    def expand_more(settings: Any) -> None:
        settings |= {"query_maxlen": 40, "attend_to_mask_tokens": True}

    original = Path(checkpoints(late_interaction.stanford))
    another, expanding = (Path(shutil.copytree(original, tmp_path / f"copy {i}")) for i in range(2))
    add_to(another, "bert.embeddings.LayerNorm.bias")
    edit(expanding / "artifact.metadata", expand_more)
    hits, scores = await run(original)
    assert hits == 0
    hits, others = await run(another)
    assert hits == 0
    assert np.abs(others - scores).max() > 1e-4, "it makes no difference"
    # The same documents' embeddings: query expansion is a matter of queries.
    hits, _ = await run(expanding)
    assert hits == len(documents)
