"""The smallest launches of the kernels of fused layers, beside their references in plain torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from maxsimd.bench.gpu.first_day.cases import DTYPES, Case, compare
from maxsimd.engine.ops.elementwise import (
    ACTIVATIONS,
    HeadNorms,
    gated,
    gated_reference,
    layer_norm,
    layer_norm_reference,
    norm_rotary_,
    norm_rotary_reference,
    rms_norm,
    rms_norm_reference,
    sum_and_layer_norm,
    sum_and_layer_norm_reference,
    sum_and_rms_norm,
    sum_and_rms_norm_reference,
)

# Both sides round once, perhaps to neighbours: as a share of the largest number.
_TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 2e-5}
_ROWS = 33


def layer_cases(
    widths: tuple[int, ...] = (100, 384, 1024, 4096), heads: tuple[int, ...] = (32, 64, 80, 128, 256)
) -> Iterator[Case]:
    """All kernels in all precisions, with rows of these widths and heads of these sizes."""
    of_width = {
        "layer norm": _layer_norm,
        "add and layer norm": _add_layer_norm,
        "RMS norm": _rms_norm,
        "add and RMS norm": _add_rms_norm,
        "gated": _gated,
    }
    for dtype, width, (name, check) in product(DTYPES, widths, of_width.items()):
        yield Case(f"{name} {dtype}, {width} wide", partial(check, _Numbers(dtype), width))
    for dtype, head_dim, normed in product(DTYPES, heads, (True, False)):
        name = f"rotary {dtype}, heads of {head_dim}, {'with' if normed else 'without'} norm"
        yield Case(name, partial(_rotary, _Numbers(dtype), head_dim, normed))


def small_layer_cases() -> Iterator[Case]:
    """A few, for an interpreter."""
    names = (
        "layer norm bf16",
        "add and layer norm bf16",
        "RMS norm bf16",
        "add and RMS norm bf16",
        "gated bf16",
        "rotary bf16",
    )
    return (case for case in layer_cases((48,), (32,)) if case.name.startswith(names))


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Random numbers of a precision, and how far results in it may be from those of the reference."""

    dtype: str

    def draw(self, device: torch.device, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * scale).to(DTYPES[self.dtype])

    def compare(self, found: torch.Tensor, exact: torch.Tensor) -> None:
        assert found.dtype is exact.dtype, f"{found.dtype} is not {exact.dtype}"
        compare(found, exact, _TOLERANCE[self.dtype] * float(exact.abs().max()))


def _layer_norm(numbers: _Numbers, width: int, device: torch.device) -> None:
    """With and without a bias, and without the sum and with it."""
    x, residual = (numbers.draw(device, _ROWS, width) for _ in range(2))
    weight, some_bias = (numbers.draw(device, width) for _ in range(2))
    for bias in (some_bias, None):
        exact = layer_norm_reference(x, weight, bias, 1e-5)
        numbers.compare(layer_norm(x, weight, bias, 1e-5), exact)
        both = sum_and_layer_norm_reference(x, residual, weight, bias, 1e-5)
        for found, wanted in zip(sum_and_layer_norm(x, residual, weight, bias, 1e-5), both, strict=True):
            numbers.compare(found, wanted)


def _add_layer_norm(numbers: _Numbers, width: int, device: torch.device) -> None:
    x, residual = (numbers.draw(device, _ROWS, width) for _ in range(2))
    weight, bias = (numbers.draw(device, width) for _ in range(2))
    exact = layer_norm_reference(x, weight, bias, 1e-5, residual)
    numbers.compare(layer_norm(x, weight, bias, 1e-5, residual), exact)


def _rms_norm(numbers: _Numbers, width: int, device: torch.device) -> None:
    x, weight = numbers.draw(device, _ROWS, width), numbers.draw(device, width)
    numbers.compare(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


def _add_rms_norm(numbers: _Numbers, width: int, device: torch.device) -> None:
    x, residual = (numbers.draw(device, _ROWS, width) for _ in range(2))
    weight = numbers.draw(device, width)
    exact = sum_and_rms_norm_reference(x, residual, weight, 1e-6)
    for found, wanted in zip(sum_and_rms_norm(x, residual, weight, 1e-6), exact, strict=True):
        numbers.compare(found, wanted)


def _gated(numbers: _Numbers, width: int, device: torch.device) -> None:
    gate_up = numbers.draw(device, _ROWS, 2 * width)
    for activation in ACTIVATIONS:
        numbers.compare(gated(gate_up, activation), gated_reference(gate_up, activation))


def _rotary(numbers: _Numbers, head_dim: int, normed: bool, device: torch.device) -> None:
    heads = (6, 3)
    qkv = numbers.draw(device, _ROWS, heads[0] + 2 * heads[1], head_dim)
    cos, sin = (numbers.draw(device, _ROWS, head_dim) for _ in range(2))
    weights = (numbers.draw(device, head_dim), numbers.draw(device, head_dim))
    norms = HeadNorms(*weights, 1e-6) if normed else None
    exact = norm_rotary_reference(qkv, cos, sin, heads, norms)
    norm_rotary_(qkv, cos, sin, heads, norms)
    numbers.compare(qkv, exact)
