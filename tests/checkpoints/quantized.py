"""Checkpoints whose matrices are quantised, as compressed-tensors and FP8 checkpoints have them. Beside each
lies the folder `plain`, with the same weights dequantised."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.checkpoints import language_models
from tests.checkpoints.weights import change_config, save_tensors

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Scheme:
    """What a config says, and how a matrix is stored: in blocks of rows and columns with a scale each."""

    config: dict[str, Any]
    block: tuple[int | None, int | None]
    ending: str = "weight_scale"
    bits: int = 8
    floats: bool = False
    shifted: bool = False
    packed: bool = False
    more: tuple[str, ...] = ()


def _compressed(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    usual = {"dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax"}
    group = {
        "targets": ["Linear"],
        "weights": usual | {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None} | weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_FLOAT = {"type": "float"}
SCHEMES = {
    "w8a8": Scheme(_compressed("int-quantized", {"strategy": "channel"}, _DYNAMIC), (1, None)),
    "w8a16, shifted": Scheme(
        _compressed("int-quantized", {"strategy": "group", "group_size": 32, "symmetric": False}),
        (1, 32), shifted=True,
    ),
    "w4a16": Scheme(
        _compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        (1, 32), bits=4, packed=True,
    ),
    "w4a16, shifted": Scheme(
        _compressed("pack-quantized",
                    {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
        (1, 64), bits=4, packed=True, shifted=True,
    ),
    "w8a16, packed": Scheme(
        _compressed("pack-quantized", {"strategy": "channel"}), (1, None), packed=True,
    ),
    "float8, tensors": Scheme(
        _compressed("float-quantized", _FLOAT | {"strategy": "tensor"}, _STATIC), (None, None), floats=True,
        more=("input_scale",),
    ),
    "float8, channels": Scheme(
        _compressed("float-quantized", _FLOAT | {"strategy": "channel"}), (1, None), floats=True,
    ),
    "float8, blocks": Scheme(
        _compressed("float-quantized", _FLOAT | {"strategy": "block", "block_structure": [48, 80]}),
        (48, 80), floats=True,
    ),
    "fp8": Scheme(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 80]},
        (48, 80), ending="weight_scale_inv", floats=True,
    ),
    "fp8, tensors": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static"}, (None, None), floats=True,
        more=("input_scale",),
    ),
}  # fmt: skip


def qwen3_reranker(folder: Path, scheme: str) -> str:
    """A Qwen3-Reranker whose layers are quantised."""
    plain, stored = folder / "plain", folder / "stored"
    language_models.qwen3_reranker(plain, num_hidden_layers=2)
    shutil.copytree(plain, stored)
    how, tensors, dequantised = SCHEMES[scheme], {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = dequantised[name] = tensor
            continue
        parts, dequantised[name] = _quantised(tensor, how)
        tensors |= {f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()}
    save_tensors(tensors, stored)
    save_tensors(dequantised, plain)
    return change_config(stored, quantization_config=how.config)


def _quantised(weight: torch.Tensor, how: Scheme) -> tuple[Tensors, torch.Tensor]:
    """The parts of a layer, and the weight that they stand for."""
    high, wide = (
        whole if size is None else size for size, whole in zip(how.block, weight.shape, strict=True)
    )
    rows, columns = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
    scales, zeros = torch.empty(rows, columns), torch.zeros(rows, columns)
    values, restored = torch.empty_like(weight), torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j], zeros[i, j], values[at] = _block(weight[at], how)
            restored[at] = (values[at] - zeros[i, j]) * scales[i, j]
    scale = scales.reshape(-1) if how.block == (None, None) else scales
    parts = {how.ending: scale, **{name: torch.ones(1) for name in how.more}}
    if not how.packed:
        parts["weight"] = values.to(FP8 if how.floats else torch.int8)
        parts |= {"weight_zero_point": zeros.to(torch.int8)} if how.shifted else {}
        return parts, restored
    parts["weight_packed"] = _packed(values, how.bits)
    parts["weight_shape"] = torch.tensor(weight.shape)
    parts |= {"weight_zero_point": _packed(zeros.T, how.bits).T} if how.shifted else {}
    return parts, restored


def _block(block: torch.Tensor, how: Scheme) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its scale, its zero point, and its values as they are stored, in float32."""
    if how.floats:
        scale = block.abs().max() / 448
        return scale, torch.tensor(0.0), (block / scale).to(FP8).float()
    least, most = -(2 ** (how.bits - 1)), 2 ** (how.bits - 1) - 1
    if how.shifted:
        scale = (block.max() - block.min()) / (most - least)
        zero = (least - block.min() / scale).round().clamp(least, most)
    else:
        scale, zero = block.abs().max() / most, torch.tensor(0.0)
    return scale, zero, (block / scale + zero).round().clamp(least, most)


def _packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers of a few bits in ones of 32 bits, along rows, one at a time."""
    rows = []
    for row in values.int().tolist():
        words = [0] * -(-len(row) * bits // 32)
        for i, value in enumerate(row):
            words[i * bits // 32] |= (value + 2 ** (bits - 1)) << (i * bits % 32)
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)
