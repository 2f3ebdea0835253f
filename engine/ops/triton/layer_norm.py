"""Layer norm as a Triton kernel, and with the residual sum before it as one.

Bytes a row of `width` numbers in 16 bits: the norm alone reads 2 `width` and writes 2 `width`. With the sum
it reads 4 and writes 2, as it ends both halves of a BERT layer. Where the next sum reads this one, it writes
2 more. Weight and bias stay in the caches. Source of the formula: Ba, Kiros & Hinton 2016 (arXiv 1607.06450),
equations 3 and 4.

Order of roundings: the mean, the variance and the result are float32, and the result is rounded once. A sum
that is written is rounded first, as transformers does; one that is not stays float32.
"""

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.triton.rows import row_tile


@triton.jit  # type: ignore[untyped-decorator]
def layer_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, width]
    residual,  # [rows, width], read if ADDED
    weight,  # [width]
    bias,  # [width], read if BIASED
    total,  # [rows, width], contiguous, written if SUMMED
    out,  # [rows, width], contiguous
    width,
    x_row,
    residual_row,
    epsilon,
    ADDED: tl.constexpr,
    SUMMED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i computes row i."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        values += tl.load(residual + row * residual_row + columns, mask=inside, other=0.0).to(tl.float32)
    if SUMMED:
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * width + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean = tl.sum(values, axis=0) / width
    centred = tl.where(inside, values - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / width
    normed = centred * (1.0 / tl.sqrt(variance + epsilon))
    normed *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        normed += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """The layer norm of `x` [rows, width], contiguous and of the same dtype. Rows of `x` may be apart in
    memory; `weight` and `bias` are [width]."""
    out = x.new_empty(x.shape)
    _launch(x, None, weight, bias, None, out, epsilon)
    return out


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """The layer norm of `x + residual`, contiguous and of their dtype. Both are [rows, width], and their rows
    may be apart in memory; `weight` and `bias` are [width]."""
    out = x.new_empty(x.shape)
    _launch(x, residual, weight, bias, None, out, epsilon)
    return out


def sum_and_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + residual` and its layer norm, both contiguous and of their dtype. `x` and `residual` are [rows,
    width], and their rows may be apart in memory; `weight` and `bias` are [width]."""
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, bias, total, out, epsilon)
    return total, out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    total: torch.Tensor | None,
    out: torch.Tensor,
    epsilon: float,
) -> None:
    rows, width = x.shape
    if rows == 0:
        return
    tile = row_tile(width)
    layer_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        out if total is None else total,
        out,
        width,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        epsilon,
        ADDED=residual is not None,
        SUMMED=total is not None,
        BIASED=bias is not None,
        BLOCK=tile.numbers,
        num_warps=tile.warps,
    )
