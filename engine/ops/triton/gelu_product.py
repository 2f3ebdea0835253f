"""A linear layer and the exact GELU after it as one Triton kernel, in 16 bits, for GPUs of compute capability
9 and 10.

Why not cuBLAS and a pass: for 16,384 rows, 1,024 inputs and 4,096 outputs the product is 137 GFLOP, 211 us at
the 650 TFLOP/s that cuBLAS has for such shapes, and the pass over its 134 MB result, read and written, is 89
us at an H100's 3.0 TB/s and 62 us at an H200's 4.3. As an epilogue it moves nothing, so the kernel is ahead
if it multiplies at more than 457 (H100) or 503 (H200) TFLOP/s. By its machine code a tile of 128 by 256 takes
26,000 cycles at least, and each multiprocessor has 16 of them: 570 TFLOP/s at most, which a test holds it to.
That L2 keeps up, at 6.6 TB/s, only a measurement can show. A kernel for bias and GELU together would gain
nothing on a pass for GELU alone: cuBLAS adds the bias before it writes.

Order of roundings: product, bias and GELU are float32, and the result is rounded once. Apart, the sum of
product and bias is rounded too. Source of the formula: Hendrycks & Gimpel 2016 (arXiv 1606.08415).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.triton.launch import INTERPRETED, limits
from maxsimd.engine.ops.triton.product import add_product

# Generations whose shared memory (227 KiB a program) holds the tiles below.
GENERATIONS = (9, 10)
# Tiles of rows that run after one another over the same columns, so that L2 serves their weights.
GROUP = 8
# The interpreter has no assembly.
_EXACT = tl.constexpr(INTERPRETED)


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program works on: `rows` and `columns` of the result, `depth` inputs at a time, with this many
    warps and stages of prefetched loads."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# The first for which every multiprocessor has a program, else the last.
TILES = (Tiles(128, 256, 64, 8, 3), Tiles(128, 128, 64, 4, 3), Tiles(64, 64, 64, 4, 4))


@triton.jit
def _reciprocal(x):  # type: ignore[no-untyped-def]
    """1 / x by the unit of special functions, to the last bit but one; Triton's division adds six
    instructions for numbers whose reciprocal has no normal exponent, which there are none of here."""
    if _EXACT:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gelu(x):  # type: ignore[no-untyped-def]
    """x times the share of the normal distribution below x, within 2e-7 of |x|: with erfc(z) = t p(t)
    exp(-z^2) and t = 1 / (1 + 0.3275911 z), z = |x| / sqrt(2), from Abramowitz & Stegun 1964, 7.1.26. The
    coefficients are halved, and z is scaled, for which GELU needs no further product. Triton's own erf takes
    three times the instructions."""
    size = tl.abs(x)
    t = _reciprocal(1.0 + 0.23164190 * size)
    p = 0.5307027145 * t - 0.7265760135
    p = p * t + 0.7107068705
    p = p * t - 0.142248368
    p = p * t + 0.127414796
    tail = size * t * p * tl.exp2(x * x * -0.7213475204444817)
    return tl.maximum(x, 0.0) - tail


@triton.jit(do_not_specialize=("count",))  # type: ignore[untyped-decorator]
def gelu_product_kernel(  # type: ignore[no-untyped-def]
    x,  # [count, width]
    weight,  # [columns, width], contiguous
    bias,  # [columns]
    out,  # [count, columns], contiguous
    count,
    width,
    columns,
    x_row,
    BIASED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program i computes a tile of the result. Tiles are counted over GROUP tiles of rows, then over all
    columns, then over the next tiles of rows. `width` is a multiple of BLOCK_DEPTH."""
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(count, BLOCK_ROWS)
    of_group = GROUP * tl.cdiv(columns, BLOCK_COLUMNS)
    first_row_tile = tile // of_group * GROUP
    in_group = tl.minimum(GROUP, row_tiles - first_row_tile)
    row_tile = first_row_tile + tile % of_group % in_group
    column_tile = tile % of_group // in_group

    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    depth = tl.arange(0, BLOCK_DEPTH)
    # Rows and columns beyond the last read the last one again, which needs no mask; they are not stored.
    x_at = x + tl.minimum(row, count - 1)[:, None].to(tl.int64) * x_row + depth[None, :]
    weight_at = weight + tl.minimum(column, columns - 1)[:, None].to(tl.int64) * width + depth[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for _ in range(0, width, BLOCK_DEPTH):
        total = add_product(total, tl.load(x_at), tl.trans(tl.load(weight_at)))
        x_at += BLOCK_DEPTH
        weight_at += BLOCK_DEPTH
    if BIASED:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    made = _gelu(total).to(out.dtype.element_ty)
    inside = (row < count)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None].to(tl.int64) * columns + column[None, :], made, mask=inside)


def is_supported(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernel takes rows of `width` numbers on a device, and is ahead of the library there."""
    if dtype not in (torch.float16, torch.bfloat16) or width % TILES[0].depth:
        return False
    return limits(device).generation in GENERATIONS or (device.type == "cpu" and INTERPRETED)


def tiles_for(device: torch.device, count: int, columns: int) -> Tiles:
    """The tiles for a result [count, columns]."""
    wanted = limits(device).multiprocessors
    for tiles in TILES:
        if triton.cdiv(count, tiles.rows) * triton.cdiv(columns, tiles.columns) >= wanted:
            return tiles
    return TILES[-1]


def gelu_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """GELU of `x @ weight.T + bias` [count, columns], for `x` [count, width], whose rows may be apart, and
    `weight` [columns, width], contiguous, all in one precision."""
    count, width = x.shape
    columns = len(weight)
    out = x.new_empty(count, columns)
    if count == 0:
        return out
    tiles = tiles_for(x.device, count, columns)
    grid = (triton.cdiv(count, tiles.rows) * triton.cdiv(columns, tiles.columns),)
    gelu_product_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        out,
        count,
        width,
        columns,
        x.stride(0),
        BIASED=bias is not None,
        BLOCK_ROWS=tiles.rows,
        BLOCK_COLUMNS=tiles.columns,
        BLOCK_DEPTH=tiles.depth,
        GROUP=GROUP,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def gelu_product_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same by plain torch, with the same roundings."""
    total = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return torch.nn.functional.gelu(total).to(x.dtype)
