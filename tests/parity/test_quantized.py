"""Quantised safetensors score as the weights that they stand for do in transformers, and formats that are not
read are refused by name."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from maxsimd.engine import EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.checkpoint.files import read_files
from maxsimd.engine.checkpoint.quantized.formats import Format, Scales
from maxsimd.engine.checkpoint.quantized.tensors import _layer, quantized_weights
from tests.checkpoints import quantized
from tests.checkpoints.quantized import SCHEMES
from tests.checkpoints.shared import SharedCheckpoints

CPU = torch.device("cpu")
LAYER = "model.layers.0.mlp.down_proj"
Tensors = dict[str, torch.Tensor]


def _read(path: str) -> Tensors:
    stored = quantized_weights(path, None, read_files(path, None))
    assert stored is not None
    return stored.read()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tensors_are_what_the_formula_says(scheme: str, checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(partial(quantized.qwen3_reranker, scheme=scheme))
    plain = load_file(Path(path).parent / "plain" / "model.safetensors")
    ours = _read(path)
    assert ours.keys() == plain.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, plain[name], rtol=1e-6, atol=1e-7)


def test_blocks_of_float8_are_what_transformers_makes_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    stored = Format("fp8", (Scales("block", block=(128, 128)),), ("weight_scale_inv",))
    assert torch.equal(_layer({"weight": weight, "weight_scale_inv": scales}, stored), theirs)


def test_what_is_left_out_is_said(checkpoints: SharedCheckpoints, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoints(partial(quantized.qwen3_reranker, scheme="w8a8"))
    model = load_model(EngineConfig(model=path, dtype="float32"), CPU)
    said = "compressed-tensors, int-quantized; the rounding of activations to int8 is left out"
    assert model.stored_as == said
    assert said in caplog.text


def _config(**changed: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= changed
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def _weights(**changed: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changed
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def _tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def _without_scale(found: Tensors) -> None:
    del found[f"{LAYER}.weight_scale"]


def _another_scale(found: Tensors) -> None:
    found[f"{LAYER}.weight_scale"] = torch.ones(3, 1)


def _scale_of_keys(found: Tensors) -> None:
    found["model.layers.0.self_attn.k_scale"] = torch.ones(1)


def _scale_of_outputs(found: Tensors) -> None:
    found[f"{LAYER}.output_scale"] = torch.ones(1)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        *[(_config(quant_method=method), f"quantised by {method}, which is not carried out here; name the")
          for method in ("gptq", "awq", "bitsandbytes", "mxfp4", "quark")],
        (_config(format="marlin-24"), "the format 'marlin-24'"),
        (_config(format="nvfp4-pack-quantized"), "the format 'nvfp4-pack-quantized'"),
        (_config(sparsity_config={"format": "sparse-24-bitmask"}), r"sparse weights \(sparse-24-bitmask\)"),
        (_config(quantization_status="frozen"), "that are frozen, not compressed"),
        (_config(kv_cache_scheme={"num_bits": 8}), "compressed-tensors with kv_cache_scheme"),
        (_config(transform_config={"config_groups": {"u": {}}}), "compressed-tensors with transform_config"),
        (_config(format="float-quantized"), r"float-quantized of \['int'\] with \[8\] bits"),
        (_config(format="pack-quantized"), "lacks weight_packed"),
        (_config(quant_method="fp8", config_groups={}, format="e5m2", fmt="e5m2"), "fp8 with format"),
        (_weights(strategy="tensor_group"), "by 'tensor_group'"),
        (_weights(num_bits=3), r"with \[3\] bits"),
        (_weights(strategy="group", group_size=48), r"has scales \[128, 1\], which do not fit"),
        (_weights(symmetric=False), "has no zero point"),
        (_weights(dynamic=True), "compressed-tensors with dynamic"),
        (_tensors(_without_scale), f"{LAYER}.weight of .* is torch.int8, but has no scale beside it"),
        (_tensors(_another_scale), r"has scales \[3, 1\], which do not fit"),
        (_tensors(_scale_of_keys), "unexpected: model.layers.0.self_attn.k_scale"),
        (_tensors(_scale_of_outputs), "unexpected: .*down_proj.output_scale"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(
    edit: Callable[[Path], None], message: str, checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    build = partial(quantized.qwen3_reranker, scheme="w8a8")
    folder = tmp_path / "changed"
    shutil.copytree(checkpoints(build), folder)
    edit(folder)
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(model=str(folder), dtype="float32"), CPU)
