"""Linear layers with weights in int8 for processors with AVX2, and VNNI or not, compiled: float32 in and out.

A row's result is the same to the last bit whatever other rows are in the call, and however many threads there
are.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from maxsimd.engine.ops.cpu.instruction_sets import may_use
from maxsimd.engine.ops.cpu.library import avx2_library
from maxsimd.engine.ops.cpu.linear import Norm

_BLOCK, _OCTET = 8, 8  # columns that are multiplied together, and inputs whose products are added in 16 bits
_ZERO = 128  # the byte of a row's zero
MOST = 63  # of a weight without VNNI, so that four products fit 16 bits


@dataclass(frozen=True, slots=True, eq=False)
class Avx2Weights:
    """The packed weights [columns, inputs] of a layer with a scale and a bias for each column; all padded
    with zeros to whole blocks. Beside each 8 weights is what undoes the shift of the rows' bytes, which is
    something else for VNNI; avx2_linear.cpp says how."""

    packed: torch.Tensor  # int32 [columns / 8, octets, 3, 8]
    scales: torch.Tensor  # float32 [columns]
    bias: torch.Tensor  # float32 [columns]
    inputs: int
    columns: int
    vnni: bool


def is_available() -> bool:
    """Whether the kernel was built and this processor can run it."""
    return avx2_library() is not None


def has_vnni() -> bool:
    """Whether this processor can also run the kernel for VNNI."""
    loaded = avx2_library()
    return loaded is not None and may_use("avx512_vnni") and bool(loaded.maxsimd_avx2_has_vnni())


def pack(weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> Avx2Weights:
    """Packs int8 weights [columns, inputs] between -63 and 63 with their scales [columns].

    Raises ValueError for larger weights, whose products do not fit."""
    if weight.numel() and int(weight.abs().max()) > MOST:
        raise ValueError(f"weights are beyond {MOST}, which the kernel cannot add up")
    return _pack(weight, scales, bias, _sums_of_four)


def pack_for_vnni(weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> Avx2Weights:
    """The same for VNNI, whose weights may be any."""
    return replace(_pack(weight, scales, bias, _sums_of_eight), vnni=True)


def _sums_of_four(octets: torch.Tensor) -> torch.Tensor:
    """[columns, octets, 8] -> int16 [columns, octets, 2]: of each half of an octet, the first two are added
    to those of the other, and so are the last two."""
    added: torch.Tensor = octets.unflatten(2, (2, 2, 2)).sum((2, 4), dtype=torch.int16)
    return added


def _sums_of_eight(octets: torch.Tensor) -> torch.Tensor:
    """[columns, octets, 8] -> int32 [columns, octets, 1]."""
    return octets.sum(2, keepdim=True, dtype=torch.int32)


def _pack(
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    added: Callable[[torch.Tensor], torch.Tensor],
) -> Avx2Weights:
    """`added` gives the sums of the weights whose products are added, of [columns, octets, 8] in 32 bits."""
    columns, inputs = weight.shape
    more = -columns % _BLOCK
    filled = torch.nn.functional.pad(weight, (0, -inputs % _OCTET, 0, more)).unflatten(1, (-1, _OCTET))
    excess = added(filled).mul_(-_ZERO).view(torch.int32)  # [columns, octets, 1]
    blocks = torch.cat([filled.contiguous().view(torch.int32), excess], dim=2).unflatten(0, (-1, _BLOCK))
    bias = torch.zeros(columns) if bias is None else bias.float()
    scales, bias = (torch.nn.functional.pad(each, (0, more)) for each in (scales.float(), bias))
    return Avx2Weights(blocks.permute(0, 2, 3, 1).contiguous(), scales, bias, inputs, columns, vnni=False)


def linear(x: torch.Tensor, weights: Avx2Weights, gelu: bool = False) -> torch.Tensor:
    """`x @ weight.T + bias`, float32 [..., inputs] to [..., columns], then GELU (exact form) if `gelu`.
    Each row of x is rounded to int8 with a scale of its own."""
    return _linear(x, weights, gelu, (None, 0, None, None, 0.0))


def linear_norm(x: torch.Tensor, residual: torch.Tensor, weights: Avx2Weights, norm: Norm) -> torch.Tensor:
    """`norm(linear(x) + residual)`, where residual is float32 [..., columns] with the rows of x."""
    rows = _as_rows(residual, weights.columns)
    norm_args = (rows.data_ptr(), rows.stride(0), norm.weight.data_ptr(), norm.bias.data_ptr(), norm.epsilon)
    return _linear(x, weights, False, norm_args)


def _linear(
    x: torch.Tensor,
    weights: Avx2Weights,
    gelu: bool,
    norm_args: tuple[int | None, int, int | None, int | None, float],
) -> torch.Tensor:
    rows = _as_rows(x, weights.inputs)
    out = torch.empty(len(rows), weights.columns)
    _library().maxsimd_avx2_linear(
        weights.vnni,
        rows.data_ptr(),
        rows.stride(0),
        len(rows),
        weights.inputs,
        weights.packed.data_ptr(),
        weights.packed.shape[1],
        weights.scales.data_ptr(),
        weights.bias.data_ptr(),
        weights.columns,
        gelu,
        *norm_args,
        out.data_ptr(),
    )
    return out.view(*x.shape[:-1], weights.columns)


def _library() -> ctypes.CDLL:
    loaded = avx2_library()
    if loaded is None:
        raise RuntimeError("the compiled kernel for AVX2 is not available on this machine")
    return loaded


def _as_rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x as [rows, columns], each row contiguous."""
    if x.dtype is not torch.float32:
        raise TypeError(f"a layer that reads float32 was given {x.dtype}")
    rows = x.reshape(-1, columns)
    return rows if rows.stride(1) == 1 else rows.contiguous()
