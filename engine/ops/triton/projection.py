"""The product of tiles for all kernels, and token embeddings from hidden states in one Triton kernel: gather,
projection and L2 normalization. Hidden states of skipped tokens are not read.

Source of the head: ColBERT, Khattab & Zaharia 2020 (arXiv 2004.12832), section 3.2."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.triton.launch import INTERPRETED, Limits, limits, next_power_of_two

# The interpreter multiplies bfloat16 numbers as if they were 16-bit integers.
_WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def add_product(total, a, b):  # type: ignore[no-untyped-def]
    """`total + a @ b`: float32 sums [m, n] of products of [m, k] and [k, n] in their own precision."""
    if _WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


# One program holds all dimensions of a row in registers until it has the row's length.
LARGEST_DIM = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of a program: `rows` rows, `hidden` input dimensions at a time, its warps, and the stages of
    prefetched loads."""

    rows: int
    hidden: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """`row @ weight.T + bias`, with `weight` [dim, width] and `bias` float32 [dim]. With an `epsilon`, each
    result is divided by its length, or by `epsilon` where it is shorter than that."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float | None


# By embedding dimensions, for 16-bit numbers and compute capability 9 and above (227 KiB of shared memory).
_TILES = {
    128: Tiles(128, 64, 8, 3),
    256: Tiles(64, 64, 8, 2),
    512: Tiles(32, 32, 8, 2),
    1024: Tiles(16, 32, 8, 1),
}
# For all other devices.
_SMALL_TILES = {
    128: Tiles(64, 32, 4, 2),
    256: Tiles(32, 32, 4, 2),
    512: Tiles(16, 32, 8, 1),
    1024: Tiles(16, 16, 8, 1),
}
# Float32 takes twice the registers.
_FLOAT32_TILES = {
    128: Tiles(32, 32, 4, 2),
    256: Tiles(16, 32, 4, 2),
    512: Tiles(16, 32, 8, 1),
    1024: Tiles(16, 16, 8, 1),
}


@triton.jit(do_not_specialize=("count",))  # type: ignore[untyped-decorator]
def projection_kernel(  # type: ignore[no-untyped-def]
    hidden,  # [rows, width]
    rows,  # int64 [count]
    weight,  # [dim, width]
    bias,  # float32 [dim]
    out,  # [count, dim]
    count,
    width,
    dim,
    hidden_row,
    weight_row,
    epsilon,
    BIASED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Program i projects the i-th BLOCK_ROWS of the gathered rows, with all output dimensions."""
    position = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = position < count
    row = tl.load(rows + position, mask=there, other=0)[:, None]
    outputs = tl.arange(0, BLOCK_DIM)
    in_dim = outputs < dim
    total = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    for first in range(0, width, BLOCK_HIDDEN):
        columns = first + tl.arange(0, BLOCK_HIDDEN)
        in_width = (columns < width)[None, :]
        x = tl.load(hidden + row * hidden_row + columns[None, :], mask=there[:, None] & in_width, other=0.0)
        w = tl.load(
            weight + outputs[:, None] * weight_row + columns[None, :],
            mask=in_dim[:, None] & in_width,
            other=0.0,
        )
        total = add_product(total, x, tl.trans(w))
    if BIASED:
        total += tl.load(bias + outputs, mask=in_dim, other=0.0)[None, :]
    if NORMALIZED:
        length = tl.sqrt(tl.sum(total * total, axis=1))
        total = total / tl.maximum(length, epsilon)[:, None]
    at = position[:, None].to(tl.int64) * dim + outputs[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there[:, None] & in_dim[None, :])


def is_supported(dim: int) -> bool:
    """Whether the kernel can make embeddings of `dim` dimensions."""
    return dim <= LARGEST_DIM


def tiles_for(device: Limits, dim: int, itemsize: int) -> Tiles:
    """The tiles for a device, embeddings of `dim` dimensions, and hidden states of `itemsize` bytes a
    number."""
    size = max(128, next_power_of_two(dim))
    if itemsize > 2:
        return _FLOAT32_TILES[size]
    return (_TILES if device.shared_memory >= 200 * 1024 else _SMALL_TILES)[size]


def project(
    hidden: torch.Tensor, rows: torch.Tensor, projection: Projection, dtype: torch.dtype
) -> torch.Tensor:
    """The embeddings `dtype` [count, dim] of `hidden[rows]`, for hidden states [n, width] in the precision of
    the weight and `rows` int64 [count]. Sums and lengths are float32."""
    weight, bias = projection.weight, projection.bias
    dim, width = weight.shape
    out = torch.empty(len(rows), dim, dtype=dtype, device=hidden.device)
    if len(rows) == 0:
        return out
    tiles = tiles_for(limits(hidden.device), dim, hidden.itemsize)
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    projection_kernel[(triton.cdiv(len(rows), tiles.rows),)](
        hidden,
        rows,
        weight,
        weight if bias is None else bias,
        out,
        len(rows),
        width,
        dim,
        hidden.stride(0),
        weight.stride(0),
        0.0 if projection.epsilon is None else projection.epsilon,
        BIASED=bias is not None,
        NORMALIZED=projection.epsilon is not None,
        BLOCK_ROWS=tiles.rows,
        BLOCK_HIDDEN=tiles.hidden,
        BLOCK_DIM=next_power_of_two(dim),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
