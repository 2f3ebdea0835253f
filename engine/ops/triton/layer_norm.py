"""Residual sum and layer norm as one Triton kernel, as they end both halves of a BERT layer.

Bytes a row of `width` numbers in 16 bits: 4 `width` read and 2 `width` written; weight and bias stay in the
caches. Apart, the sum and the norm read 6 and write 4. Source of the formula: Ba, Kiros & Hinton 2016 (arXiv
1607.06450), equations 3 and 4.

Order of roundings: the sum, its mean, its variance and the result are float32, and the result is rounded
once. Apart, the sum is rounded too.
"""

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.triton.rows import LARGEST_WIDTH, row_tile


@triton.jit  # type: ignore[untyped-decorator]
def add_layer_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, width]
    residual,  # [rows, width]
    weight,  # [width]
    bias,  # [width]
    out,  # [rows, width], contiguous
    width,
    x_row,
    residual_row,
    epsilon,
    BLOCK: tl.constexpr,
):
    """Program i computes row i."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + row * residual_row + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / width
    centred = tl.where(inside, total - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / width
    scaled = centred * (1.0 / tl.sqrt(variance + epsilon))
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    normed = scaled * w + b
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=inside)


def is_supported(width: int) -> bool:
    """Whether a program can hold a row of `width` numbers."""
    return width <= LARGEST_WIDTH


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """The layer norm of `x + residual`, for [rows, width] each in one precision, whose rows may be apart;
    contiguous, in that precision."""
    rows, width = x.shape
    out = x.new_empty(rows, width)
    if rows:
        tile = row_tile(width)
        add_layer_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            bias,
            out,
            width,
            x.stride(0),
            residual.stride(0),
            epsilon,
            BLOCK=tile.numbers,
            num_warps=tile.warps,
        )
    return out


def add_layer_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """The same by plain torch, with the same roundings."""
    total = x.float() + residual.float()
    normed = torch.nn.functional.layer_norm(total, total.shape[-1:], weight.float(), bias.float(), epsilon)
    return normed.to(x.dtype)
