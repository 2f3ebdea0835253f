"""Linear layers, compiled, and what follows them: bfloat16 in and out, weights in bfloat16 or int8."""

from dataclasses import dataclass

import torch

from maxsimd.kernels.library import kernels

LANES = 16  # columns of a packed block
INT8_MAX = 127


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The weights [columns, inputs] of a layer, packed. With int8 each column has a scale and the sum of its
    weights, which takes away the offset of the unsigned activations."""

    packed: torch.Tensor  # int32 [ceil(columns / 16), units, 16]
    inputs: int
    columns: int
    scales: torch.Tensor | None = None  # float32 [columns]
    sums: torch.Tensor | None = None  # int32 [columns]


def pack_bfloat16(weight: torch.Tensor) -> Weights:
    """Packs [columns, inputs]; inputs must be even."""
    columns, inputs = weight.shape
    if inputs % 2:
        raise ValueError(f"bfloat16 weights are packed in pairs, and {inputs} inputs are not even")
    return Weights(_pack(weight.to(torch.bfloat16)), inputs, columns)


def pack_int8(weight: torch.Tensor) -> Weights:
    """Rounds [columns, inputs] to int8, symmetrically, each column with its own scale, and packs it."""
    columns, inputs = weight.shape
    scales = weight.float().abs().amax(dim=1) / INT8_MAX
    # A column of zeros has the scale 0, and any number will do to divide by.
    rounded = (weight.float() / scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)
    filled = torch.nn.functional.pad(rounded, (0, -inputs % 4))
    return Weights(_pack(filled), inputs, columns, scales, rounded.sum(dim=1, dtype=torch.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A layer norm: float32 weight and bias [columns], and epsilon."""

    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float


def linear(x: torch.Tensor, weights: Weights, bias: torch.Tensor | None, gelu: bool = False) -> torch.Tensor:
    """`x @ weight.T + bias`, through GELU (exact form) if asked: bfloat16 [..., inputs] -> [..., columns].

    With int8 weights, each row of x is rounded to int8 with a scale of its own."""
    return _linear(x, weights, bias, gelu, (None, 0, None, None, 0.0))


def linear_norm(
    x: torch.Tensor, residual: torch.Tensor, weights: Weights, bias: torch.Tensor | None, norm: Norm
) -> torch.Tensor:
    """`norm(linear(x) + residual)`, where residual is bfloat16 [..., columns] with the rows of x."""
    rows = _as_rows(residual, weights.columns)
    added = (rows.data_ptr(), rows.stride(0), norm.weight.data_ptr(), norm.bias.data_ptr(), norm.epsilon)
    return _linear(x, weights, bias, False, added)


def _linear(
    x: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None,
    gelu: bool,
    norm: tuple[int | None, int, int | None, int | None, float],
) -> torch.Tensor:
    rows = _as_rows(x, weights.inputs)
    out = torch.empty(len(rows), weights.columns, dtype=torch.bfloat16)
    biases = None if bias is None else bias.data_ptr()
    shape = (rows.data_ptr(), rows.stride(0), len(rows), weights.inputs, weights.packed.data_ptr())
    behind = (weights.columns, gelu, *norm, out.data_ptr())
    if weights.scales is None or weights.sums is None:
        kernels().maxsimd_linear_bfloat16(*shape, biases, *behind)
    else:
        numbers = (weights.scales.data_ptr(), weights.sums.data_ptr())
        kernels().maxsimd_linear_int8(*shape, *numbers, biases, *behind)
    return out.view(*x.shape[:-1], weights.columns)


def _as_rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    rows = x.reshape(-1, columns)
    return rows if rows.stride(1) == 1 and rows.stride(0) % 2 == 0 else rows.contiguous()


def _pack(weight: torch.Tensor) -> torch.Tensor:
    units = weight.contiguous().view(torch.int32)  # [columns, units]
    columns, count = units.shape
    packed = torch.empty(-(-columns // LANES), count, LANES, dtype=torch.int32)
    kernels().maxsimd_pack(units.data_ptr(), columns, count, packed.data_ptr())
    return packed
