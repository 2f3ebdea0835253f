"""Checkpoints whose matrices are quantised; `plain` beside each has the same weights dequantised."""

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
    """The text of a config, and the storage of a matrix: blocks of rows and columns with a scale each."""

    config: dict[str, Any]
    block: tuple[int | None, int | None]
    ending: str = "weight_scale"
    bits: int = 8
    floats: bool = False
    shifted: bool = False
    packed: bool = False
    more: tuple[str, ...] = ()


def _compressed(form: str, weights: dict[str, Any], activations: Any = None) -> dict[str, Any]:
    usual = {"dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax"}
    group = {
        "targets": ["Linear"],
        "weights": usual | {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None} | weights,
        "input_activations": activations, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "global_compression_ratio": None, "kv_cache_scheme": None, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_FLOAT = {"type": "float"}
SCHEMES = {
    "w8a8": Scheme(_compressed("int-quantized", {"strategy": "channel"}, _DYNAMIC), (1, None)),
    "w8a16, shifted": Scheme(
        _compressed("int-quantized", {"strategy": "group", "group_size": 32, "symmetric": False}),
        (1, 32), shifted=True),
    "w4a16": Scheme(
        _compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        (1, 32), bits=4, packed=True),
    "w4a16, shifted": Scheme(
        _compressed("pack-quantized",
                    {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
        (1, 64), bits=4, packed=True, shifted=True),
    "w8a16, packed": Scheme(_compressed("pack-quantized", {"strategy": "channel"}), (1, None), packed=True),
    "float8, tensors": Scheme(
        _compressed("float-quantized", _FLOAT | {"strategy": "tensor"}, _STATIC), (None, None), floats=True,
        more=("input_scale",)),
    "float8, channels": Scheme(
        _compressed("float-quantized", _FLOAT | {"strategy": "channel"}), (1, None), floats=True),
    "float8, blocks": Scheme(
        _compressed("float-quantized", _FLOAT | {"strategy": "block", "block_structure": [48, 80]}),
        (48, 80), floats=True),
    "fp8": Scheme(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 80]},
        (48, 80), ending="weight_scale_inv", floats=True),
    "fp8, tensors": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static"}, (None, None), floats=True,
        more=("input_scale",)),
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
    (high, wide), (rows, columns) = how.block, weight.shape
    high, wide = high or rows, wide or columns
    # The last blocks may be smaller; zeros change no largest value, and no zero point where all are whole.
    padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    blocks = padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).transpose(1, 2).flatten(2)
    scales, zeros = _scales(blocks, how)

    def of_each(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]

    values = weight / of_each(scales) + of_each(zeros)
    least, most = -(2 ** (how.bits - 1)), 2 ** (how.bits - 1) - 1
    values = values.to(FP8).float() if how.floats else values.round().clamp(least, most)
    restored = (values - of_each(zeros)) * of_each(scales)
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


def _scales(blocks: torch.Tensor, how: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and the zero points of blocks, whose values are the last dimension."""
    largest, none = blocks.abs().amax(-1), torch.zeros(blocks.shape[:2])
    if how.floats:
        return largest / 448, none
    least, most = -(2 ** (how.bits - 1)), 2 ** (how.bits - 1) - 1
    if not how.shifted:
        return largest / most, none
    scales = (blocks.amax(-1) - blocks.amin(-1)) / (most - least)
    return scales, (least - blocks.amin(-1) / scales).round().clamp(least, most)


def _packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers of a few bits in ones of 32 bits, along rows, the first in the lowest bits."""
    each = 32 // bits
    shifted = values.long() + 2 ** (bits - 1)
    words = torch.nn.functional.pad(shifted, (0, -values.shape[1] % each)).unflatten(1, (-1, each))
    return (words << torch.arange(0, 32, bits)).sum(-1).to(torch.int32)
