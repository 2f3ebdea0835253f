"""Quantized weights in safetensors, read as float32: (integer - zero point) * scale, or 8-bit float * scale.

Sources: the package compressed-tensors, whose configs and formats llm-compressor writes, and the configs of
DeepSeek's and Qwen's FP8 checkpoints."""

import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from safetensors import safe_open

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.weights import StoredWeights, files_of_tensors
from maxsimd.engine.errors import ModelLoadError

log = logging.getLogger(__name__)
_INT, _PACKED, _FLOAT = "int-quantized", "pack-quantized", "float-quantized"
# Settings that change nothing about what weights stand for, or are read.
_OF_A_CONFIG = {"quant_method", "config_groups", "format", "quantization_status", "ignore", "version",
                "global_compression_ratio"}  # fmt: skip
_OF_A_GROUP = {"targets", "weights", "input_activations", "format"}
_OF_WEIGHTS = {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder",
               "observer", "observer_kwargs", "scale_dtype", "zp_dtype"}  # fmt: skip
_OF_FP8 = {"quant_method", "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert",
           "ignored_layers"}  # fmt: skip


# The rows and columns that share a scale; None for all.
Block: TypeAlias = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format of weights. `name` is for people; `packed` are several integers of `bits` in one of 32
    bits. The matrix of each layer has a scale for each block of one of the `blocks`, named `ending`, and with
    `shifted` a zero point. `activations` says how the inputs of layers were to be rounded, too."""

    name: str
    blocks: tuple[Block, ...]
    ending: str = "weight_scale"
    packed: bool = False
    bits: frozenset[int] = frozenset({8})
    shifted: bool = False
    activations: str = ""

    @property
    def form(self) -> str:
        """For people: how weights are stored, and what is left out."""
        left_out = f"; the rounding of activations to {self.activations} is left out" * bool(self.activations)
        return f"{self.name}{left_out}"


def format_of(model: str, files: CheckpointFiles) -> Format | None:
    """The format of a checkpoint's weights, None for usual ones. Raises ModelLoadError for one that is not
    read."""
    stated = files.config.get("quantization_config") or files.config.get("compression_config")
    if not stated:
        return None
    if not isinstance(stated, dict):
        raise ModelLoadError(f"config.json of {model!r} has a quantization_config that is no object")
    method = stated.get("quant_method") or stated.get("format") or "an unnamed method"
    if method == "compressed-tensors":
        found = _compressed(model, stated)
    elif method == "fp8":
        found = _fp8(model, stated)
    else:
        raise _not_read(model, str(method))
    if "vision_config" in files.config or not files.config_at_root:
        raise _not_read(model, f"{method} in a model that reads pictures, or in a folder of its own")
    return found


def _not_read(model: str, method: str) -> ModelLoadError:
    return ModelLoadError(
        f"the weights of {model!r} are quantized by {method}, which is not supported; name the "
        'checkpoint that it was made from (quantization="int8" quantizes that one)'
    )


def _refuse_others(model: str, stated: Mapping[str, Any], read: set[str], inside: str) -> None:
    """Raises ModelLoadError for a setting that is not read, unless it is empty or off."""
    others = sorted(name for name, value in stated.items() if value and name not in read)
    if others:
        raise _not_read(model, f"{inside} with {', '.join(others)}")


def _compressed(model: str, stated: Mapping[str, Any]) -> Format:
    named = stated.get("format")
    if named not in (_INT, _PACKED, _FLOAT):
        raise _not_read(model, f"compressed-tensors in the format {named!r}")
    sparse = stated.get("sparsity_config") or {}
    if sparse.get("format", "dense") != "dense":
        raise _not_read(model, f"compressed-tensors with sparse weights ({sparse['format']})")
    if stated.get("quantization_status", "compressed") != "compressed":
        raise _not_read(model, f"compressed-tensors that are {stated['quantization_status']}, not compressed")
    _refuse_others(model, stated, _OF_A_CONFIG | {"sparsity_config"}, "compressed-tensors")
    groups = list((stated.get("config_groups") or {}).values())
    weights = []
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise _not_read(model, "compressed-tensors in groups without settings of weights")
        _refuse_others(model, group, _OF_A_GROUP, "compressed-tensors")
        _refuse_others(model, group["weights"], _OF_WEIGHTS, "compressed-tensors")
        if group.get("format") not in (None, named):
            raise _not_read(model, f"compressed-tensors in the format {group['format']!r}")
        weights.append(group["weights"])
    kinds = {str(each.get("type", "int")) for each in weights}
    bits = {int(each.get("num_bits", 8)) for each in weights}
    if kinds != {"float" if named == _FLOAT else "int"} or not bits <= ({4, 8} if named != _FLOAT else {8}):
        raise _not_read(model, f"compressed-tensors as {named} of {sorted(kinds)} with {sorted(bits)} bits")
    inputs = [stated for group in groups if (stated := group.get("input_activations"))]
    rounded = {f"{each.get('type', 'int')}{each.get('num_bits', 8)}" for each in inputs}
    return Format(
        f"compressed-tensors, {named}",
        tuple(_block(model, each) for each in weights),
        packed=named == _PACKED,
        bits=frozenset(bits),
        shifted=not any(each.get("symmetric", True) for each in weights),
        activations=" and ".join(sorted(rounded)),
    )


def _block(model: str, stated: Mapping[str, Any]) -> Block:
    group, block = stated.get("group_size"), stated.get("block_structure")
    strategy = stated.get("strategy")
    if strategy is None:  # as compressed-tensors takes it
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy == "group" and isinstance(group, int) and group > 0:
        return 1, group
    if strategy == "block" and isinstance(block, list) and len(block) == 2:
        return int(block[0]), int(block[1])
    if strategy in ("tensor", "channel"):
        return (1 if strategy == "channel" else None), None
    raise _not_read(model, f"compressed-tensors by {strategy!r} of size {block or group}")


def _fp8(model: str, stated: Mapping[str, Any]) -> Format:
    """DeepSeek's and Qwen's: blocks with a `weight_scale_inv` each, which multiplies; without blocks, one
    scale for a matrix or for each of its rows."""
    _refuse_others(model, stated, _OF_FP8, "fp8")
    if stated.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _not_read(model, f"fp8 in the format {stated['fmt']!r}")
    block = stated.get("weight_block_size")
    if block is None:
        return Format("fp8", ((None, None), (1, None)), activations="float8")
    if not isinstance(block, list) or len(block) != 2:
        raise _not_read(model, f"fp8 in blocks of {block}")
    return Format("fp8", ((block[0], block[1]),), "weight_scale_inv", activations="float8")


_STORED_AS = (torch.int8, torch.float8_e4m3fn)
# Parts of a layer beside its weight and its scale.
_PARTS = ("weight_packed", "weight_shape", "weight_g_idx", "weight_zero_point")
# Scales of activations, which are not rounded here.
_OF_ACTIVATIONS = ("input_scale", "input_zero_point")


def quantized_weights(model: str, revision: str | None, files: CheckpointFiles) -> StoredWeights | None:
    """The weights of a checkpoint whose config says that they are quantized; None for usual ones. Raises
    ModelLoadError for a format that is not read."""
    found = format_of(model, files)
    if found is None:
        return None
    if found.activations:
        log.warning("%s: %s", model, found.form)
    return StoredWeights(partial(_read, model, revision, found), found.form)


def _read(model: str, revision: str | None, stored: Format) -> dict[str, torch.Tensor]:
    """All tensors, float32. Raises ModelLoadError where one lacks its scale, or has one that does not fit."""
    files = files_of_tensors(model, revision)
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in {*files.values()}}
        tensors = {name: partial(opened[path].get_tensor, name) for name, path in files.items()}
        layers: dict[str, list[str]] = defaultdict(list)
        for name in tensors:
            layers[name.rpartition(".")[0]].append(name.rpartition(".")[2])
        read: dict[str, torch.Tensor] = {}
        used = {"weight", stored.ending, *_PARTS, *(_OF_ACTIVATIONS if stored.activations else ())}
        for layer, parts in layers.items():
            quantized = used.intersection(parts) if stored.ending in parts else set()
            if quantized:
                found = {part: tensors[f"{layer}.{part}"]() for part in quantized}
                try:
                    read[f"{layer}.weight"] = _layer(found, stored)
                except ModelLoadError as error:
                    raise ModelLoadError(f"{layer}.weight of {model!r} {error}") from error
            for part in set(parts) - quantized:
                name = f"{layer}.{part}".removeprefix(".")
                tensor = tensors[name]()
                if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
                    raise ModelLoadError(f"{name} of {model!r} is {tensor.dtype}, but has no scale beside it")
                read[name] = tensor.float()
    return read


def _layer(parts: dict[str, torch.Tensor], stored: Format) -> torch.Tensor:
    """The matrix [out, in] of one layer from its parts. Raises ModelLoadError, without its name."""
    scale = parts[stored.ending].float()
    shift = parts.get("weight_zero_point")
    if shift is None and stored.shifted:
        raise ModelLoadError("has no zero point")
    if stored.packed:
        weight, shift = _unpacked(parts, shift, stored.bits)
    else:
        weight = parts.get("weight", torch.empty(0, dtype=torch.float32))
        if weight.dtype not in _STORED_AS or weight.ndim != 2:
            raise ModelLoadError(f"is {weight.dtype} {list(weight.shape)}, which has no scales")
    spread = partial(_spread, shape=weight.shape, blocks=stored.blocks, columns=parts.get("weight_g_idx"))
    values = weight.float()
    if shift is not None:
        if shift.numel() != scale.numel():
            raise ModelLoadError(f"has zero points {list(shift.shape)} and scales {list(scale.shape)}")
        values = values - spread(shift.float().reshape(scale.shape))
    return values * spread(scale)


def _unpacked(
    parts: dict[str, torch.Tensor], shift: torch.Tensor | None, allowed: frozenset[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The integers of a layer [out, in] and its zero points [out, groups]. Their number of bits follows from
    how many integers of 32 hold a row."""
    packed, shape = parts.get("weight_packed"), parts.get("weight_shape")
    if packed is None or shape is None or shape.numel() != 2 or packed.dtype != torch.int32:
        raise ModelLoadError("lacks weight_packed or weight_shape, or has others than 32-bit integers")
    rows, columns = (int(size) for size in shape)
    bits = next((each for each in sorted(allowed) if packed.shape == (rows, -(-columns * each // 32))), None)
    if bits is None:
        raise ModelLoadError(f"is packed as {list(packed.shape)}, which is not {[rows, columns]}")
    if shift is not None and shift.dtype == torch.int32:  # packed along its rows
        shift = _integers(shift.T, bits)[:, :rows].T
    return _integers(packed, bits)[:, :columns], shift


def _integers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed integers [rows, n], the first of which are in the lowest bits, from 32-bit ones [rows, m]."""
    first_bits = torch.arange(0, 32, bits, dtype=torch.int32)
    values: torch.Tensor = (packed[..., None] >> first_bits) & (2**bits - 1)  # [rows, m, 32 / bits]
    return values.flatten(1) - int(2 ** (bits - 1))


def _spread(
    scale: torch.Tensor, shape: torch.Size, blocks: tuple[Block, ...], columns: torch.Tensor | None
) -> torch.Tensor:
    """A scale for each value of a matrix of a shape, or what is broadcast to it. With `columns` these are the
    numbers of the columns' groups. Raises ModelLoadError for one that fits none of the `blocks`."""
    rows, width = shape
    for high, wide in blocks:
        sizes = high or rows, wide or width
        parts = -(-rows // sizes[0]), -(-width // sizes[1])
        is_row = parts[1] == 1 and scale.ndim < 2 and scale.numel() == parts[0]
        if not is_row and scale.shape != parts:
            continue
        if columns is not None and bool((columns >= 0).all()):
            return scale.reshape(parts)[:, columns.long()]
        spread = scale.reshape(parts)
        for dim in (0, 1):
            if parts[dim] > 1 < sizes[dim]:
                spread = spread.repeat_interleave(sizes[dim], dim)
        return spread[:rows, :width]
    raise ModelLoadError(f"is {list(shape)} and has scales {list(scale.shape)}, which do not fit")
