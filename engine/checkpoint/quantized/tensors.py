"""Quantised matrices as float32: (integer - zero point) * scale, or 8-bit float * scale."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from safetensors import safe_open

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.quantized.formats import Format, Scales, format_of
from maxsimd.engine.checkpoint.stored import StoredWeights
from maxsimd.engine.checkpoint.weights import files_of_tensors
from maxsimd.engine.errors import ModelLoadError

log = logging.getLogger(__name__)

_STORED_AS = (torch.int8, torch.float8_e4m3fn)
# What a layer may have beside its weight and its scale.
_PARTS = ("weight_packed", "weight_shape", "weight_g_idx", "weight_zero_point")
# Scales of activations, which are not rounded here.
_OF_ACTIVATIONS = ("input_scale", "input_zero_point")


def quantized_weights(model: str, revision: str | None, files: CheckpointFiles) -> StoredWeights | None:
    """The weights of a checkpoint whose config says that they are quantised; None for usual ones. Raises
    ModelLoadError for a format that is not read."""
    found = format_of(model, files)
    if found is None:
        return None
    if found.activations:
        log.warning("%s: %s", model, found.form)
    return StoredWeights(partial(_read, model, revision, found), found.form)


def _read(model: str, revision: str | None, stored: Format) -> dict[str, torch.Tensor]:
    """All tensors, float32. Raises ModelLoadError where one lacks its scale, or has one that does not fit."""
    with _opened(model, revision) as tensors:
        layers: dict[str, list[str]] = defaultdict(list)
        for name in tensors:
            layers[name.rpartition(".")[0]].append(name.rpartition(".")[2])
        read: dict[str, torch.Tensor] = {}
        used = {"weight", *_PARTS, *stored.endings} | (set(_OF_ACTIVATIONS) if stored.activations else set())
        for layer, parts in layers.items():
            quantised = used.intersection(parts) if set(parts).intersection(stored.endings) else set()
            if quantised:
                try:
                    read[f"{layer}.weight"] = _layer(
                        {part: tensors[f"{layer}.{part}"]() for part in quantised}, stored
                    )
                except ModelLoadError as error:
                    raise ModelLoadError(f"{layer}.weight of {model!r} {error}") from error
            for part in set(parts) - quantised:
                name = f"{layer}.{part}".removeprefix(".")
                tensor = tensors[name]()
                if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
                    raise ModelLoadError(f"{name} of {model!r} is {tensor.dtype}, but has no scale beside it")
                read[name] = tensor.float()
    return read


@contextmanager
def _opened(model: str, revision: str | None) -> Iterator[dict[str, Callable[[], torch.Tensor]]]:
    """What reads each tensor, by its name."""
    with ExitStack() as stack:
        files = files_of_tensors(model, revision)
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in set(files.values())}
        yield {name: partial(opened[path].get_tensor, name) for name, path in files.items()}


def _layer(parts: dict[str, torch.Tensor], stored: Format) -> torch.Tensor:
    """The matrix [out, in] of one layer from its parts. Raises ModelLoadError, without its name."""
    scale = next(parts[ending] for ending in stored.endings if ending in parts).float()
    shift = parts.get("weight_zero_point")
    if shift is None and stored.shifted:
        raise ModelLoadError("has no zero point")
    if stored.packed:
        weight, shift = _unpacked(parts, shift, stored.bits)
    else:
        weight = parts.get("weight", torch.empty(0))
        if weight.dtype not in _STORED_AS or weight.ndim != 2:
            raise ModelLoadError(f"is {weight.dtype} {list(weight.shape)}, which has no scales")
    columns = parts.get("weight_g_idx")
    spread = partial(_spread, shape=weight.shape, kinds=stored.scales, columns=columns)
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
    integers: torch.Tensor = values.flatten(1) - int(2 ** (bits - 1))
    return integers


def _spread(
    scale: torch.Tensor, shape: torch.Size, kinds: tuple[Scales, ...], columns: torch.Tensor | None
) -> torch.Tensor:
    """A scale for each value of a matrix of a shape, or what is broadcast to it. With `columns` these are the
    numbers of the columns' groups. Raises ModelLoadError for one that no kind of scales fits."""
    rows, width = shape
    for kind in kinds:
        if kind.strategy == "tensor" and scale.numel() == 1:
            return scale.reshape(1, 1)
        if kind.strategy == "channel" and scale.numel() == rows and scale.shape in ((rows,), (rows, 1)):
            return scale.reshape(rows, 1)
        if kind.group is not None and scale.shape == (rows, -(-width // kind.group)):
            if columns is not None and bool((columns >= 0).all()):
                return scale[:, columns.long()]
            return scale.repeat_interleave(kind.group, dim=1)[:, :width]
        if kind.block is not None:
            high, wide = kind.block
            if scale.shape == (-(-rows // high), -(-width // wide)):
                whole = scale.repeat_interleave(high, dim=0).repeat_interleave(wide, dim=1)
                return whole[:rows, :width]
    raise ModelLoadError(f"is {list(shape)} and has scales {list(scale.shape)}, which do not fit")
