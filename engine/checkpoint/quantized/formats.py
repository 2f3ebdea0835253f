"""What a config says about how its weights are quantised, and the refusal of all that is not read.

Sources: the package compressed-tensors, whose configs and formats llm-compressor writes, and the configs of
DeepSeek's and Qwen's FP8 checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.errors import ModelLoadError

_INT, _PACKED, _FLOAT = "int-quantized", "pack-quantized", "float-quantized"
# Settings that change nothing about what weights stand for, or are read.
_OF_A_CONFIG = {"quant_method", "config_groups", "format", "quantization_status", "ignore", "version",
                "global_compression_ratio"}  # fmt: skip
_OF_A_GROUP = {"targets", "weights", "input_activations", "format"}
_OF_WEIGHTS = {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder",
               "observer", "observer_kwargs", "scale_dtype", "zp_dtype"}  # fmt: skip
_OF_FP8 = {"quant_method", "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert",
           "ignored_layers"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scales:
    """What a scale stands for: all of a matrix ("tensor"), a row of it ("channel"), `group` columns of a
    row, or a `block` of rows and columns."""

    strategy: str
    group: int | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored. `name` is for people; `packed` are several integers of `bits` in one of 32
    bits. The matrix of each layer has scales of one of the kinds in `scales`, under one of the `endings`, and
    with `shifted` a zero point. `activations` says how the inputs of layers were to be rounded, too."""

    name: str
    scales: tuple[Scales, ...]
    endings: tuple[str, ...] = ("weight_scale",)
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
        f"the weights of {model!r} are quantised by {method}, which is not carried out here; name the "
        'checkpoint that it was made from (quantization="int8" quantises that one)'
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
    rounded = {_activations(group["input_activations"]) for group in groups if group.get("input_activations")}
    return Format(
        f"compressed-tensors, {named}",
        tuple(_scales(model, each) for each in weights),
        packed=named == _PACKED,
        bits=frozenset(bits),
        shifted=not any(each.get("symmetric", True) for each in weights),
        activations=" and ".join(sorted(rounded)),
    )


def _activations(stated: Mapping[str, Any]) -> str:
    return f"{stated.get('type', 'int')}{stated.get('num_bits', 8)}"


def _scales(model: str, stated: Mapping[str, Any]) -> Scales:
    group, block = stated.get("group_size"), stated.get("block_structure")
    strategy = stated.get("strategy")
    if strategy is None:  # as compressed-tensors takes it
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy == "group" and isinstance(group, int) and group > 0:
        return Scales("group", group=group)
    if strategy == "block" and isinstance(block, list) and len(block) == 2:
        return Scales("block", block=(int(block[0]), int(block[1])))
    if strategy in ("tensor", "channel"):
        return Scales(strategy)
    raise _not_read(model, f"compressed-tensors by {strategy!r} of size {block or group}")


def _fp8(model: str, stated: Mapping[str, Any]) -> Format:
    """DeepSeek's and Qwen's: blocks with a `weight_scale_inv` each, which multiplies; without blocks, one
    scale for a matrix or for each of its rows."""
    _refuse_others(model, stated, _OF_FP8, "fp8")
    if stated.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _not_read(model, f"fp8 in the format {stated['fmt']!r}")
    block = stated.get("weight_block_size")
    if block is not None and (not isinstance(block, list) or len(block) != 2):
        raise _not_read(model, f"fp8 in blocks of {block}")
    if block is None:
        return Format("fp8", (Scales("tensor"), Scales("channel")), activations="float8")
    scales = Scales("block", block=(block[0], block[1]))
    return Format("fp8", (scales,), ("weight_scale_inv",), activations="float8")
