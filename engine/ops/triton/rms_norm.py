"""RMSNorm as a Triton kernel, and with the residual sum before it as one.

Bytes a row of `width` numbers in 16 bits: the norm alone reads 2 `width` and writes 2 `width`; with the sum,
which is written too because the next sum reads it, 4 and 4. Plain torch has a float32 copy of the row between
its six kernels. Source of the formula: Zhang & Sennrich 2019 (arXiv 1910.07467), equation 4.

Order of roundings: the sum is rounded to the model's precision, as transformers does, and the rounded sum is
normed in float32. The product with the weight is float32 and rounded once; transformers rounds before it too.
"""

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.triton.rows import row_tile


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, width]
    residual,  # [rows, width], read if ADDED
    weight,  # [width]
    total,  # [rows, width], contiguous, written if ADDED
    out,  # [rows, width], contiguous
    width,
    x_row,
    residual_row,
    epsilon,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i computes row i."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        values += tl.load(residual + row * residual_row + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * width + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + epsilon)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = values * scale * w
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The norm of the rows of `x` [rows, width], which may be apart; contiguous, in the precision of `x`."""
    out = x.new_empty(x.shape)
    _launch(x, None, weight, out, out, epsilon)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + residual` and its norm, for [rows, width] each in one precision, whose rows may be apart; both
    contiguous, in that precision."""
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, total, out, epsilon)
    return total, out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    epsilon: float,
) -> None:
    rows, width = x.shape
    if rows == 0:
        return
    tile = row_tile(width)
    rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        total,
        out,
        width,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        epsilon,
        ADDED=residual is not None,
        BLOCK=tile.numbers,
        num_warps=tile.warps,
    )
