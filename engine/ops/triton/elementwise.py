"""The functions of `ops/elementwise.py` as Triton kernels: norms with the sum before them, rotary positions,
gates.

Bytes a row of `width` 16-bit numbers: a norm reads 2 `width` and writes as many, with the sum before it it
reads 4 and writes 2, or 4 if the sum is written too. Rotation reads and writes 2 `head_dim` a head in place.
A gate reads 4 and writes 2. Weights, cosines and sines stay in the caches.

Sums, norms, rotations and gates are float32 and rounded once; transformers rounds in between. A sum that is
written is rounded first, as in transformers."""

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.elementwise import Activation, HeadNorms
from maxsimd.engine.ops.triton.launch import next_power_of_two

# Numbers that a warp of 32 threads loads at a time: 8 of 16 bits a thread.
_OF_A_WARP = 256
_MOST_WARPS = 16


def row_tile(width: int) -> tuple[int, int]:
    """The numbers of a row of `width` that a program holds, a power of two, and its warps."""
    numbers = next_power_of_two(width)
    return numbers, min(_MOST_WARPS, max(1, numbers // _OF_A_WARP))


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
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
    CENTERED: tl.constexpr,
    ADDED: tl.constexpr,
    SUMMED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i computes row i: LayerNorm if CENTERED, else RMSNorm."""
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
    if CENTERED:
        values = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + epsilon)
    normed = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        normed += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    total: torch.Tensor | None,
    out: torch.Tensor,
    *,
    is_centered: bool,
) -> None:
    """Writes the norm of `x`, or of its sum with `residual`, to `out`, and the sum to `total` if given. All
    are [rows, width]; the inputs may have any row stride."""
    rows, width = x.shape
    if rows == 0:
        return
    block, warps = row_tile(width)
    norm_kernel[(rows,)](
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
        CENTERED=is_centered,
        ADDED=residual is not None,
        SUMMED=total is not None,
        BIASED=bias is not None,
        BLOCK=block,
        num_warps=warps,
    )


# Numbers that a program of two warps holds: 16 a thread.
_NUMBERS = 1024
WARPS = 2


@triton.jit  # type: ignore[untyped-decorator]
def norm_rotary_kernel(  # type: ignore[no-untyped-def]
    qkv,  # [rows, heads, head_dim], contiguous within a row: queries, keys, values
    cos,  # [rows, head_dim], contiguous
    sin,  # [rows, head_dim], contiguous
    query_weight,  # [head_dim]
    key_weight,  # [head_dim]
    qkv_row,
    queries,  # heads
    heads,  # of queries and keys together
    half,  # head_dim / 2
    epsilon,
    NORMED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Program (row, block of heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    in_half = column < half
    inside = (head < heads)[:, None] & in_half[None, :]
    at = qkv + row * qkv_row + head[:, None] * (2 * half) + column[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first + second * second, axis=1)
        scale = (1.0 / tl.sqrt(squares / (2 * half) + epsilon))[:, None]
        is_query = (head < queries)[:, None]
        query_first = tl.load(query_weight + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
        query_second = tl.load(query_weight + half + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
        key_first = tl.load(key_weight + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
        key_second = tl.load(key_weight + half + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
        first = first * scale * tl.where(is_query, query_first, key_first)
        second = second * scale * tl.where(is_query, query_second, key_second)
    angle = row * (2 * half) + column
    cos_first = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + angle + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + angle + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    rotated_first = first * cos_first - second * sin_first
    rotated_second = second * cos_second + first * sin_second
    tl.store(at, rotated_first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(at + half, rotated_second.to(qkv.dtype.element_ty), mask=inside)


def blocks_for(heads: int, head_dim: int) -> tuple[int, int]:
    """The heads of a program, for `heads` of queries and keys, and the numbers of their padded halves."""
    half = next_power_of_two(head_dim // 2)
    return min(next_power_of_two(heads), _NUMBERS // (2 * half)), half


def norm_rotary_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    norms: HeadNorms | None,
) -> None:
    rows, _, head_dim = qkv.shape
    if rows == 0:
        return
    queries, together = heads[0], sum(heads)
    block_heads, half = blocks_for(together, head_dim)
    query_weight, key_weight, epsilon = norms or (qkv, qkv, 0.0)
    norm_rotary_kernel[(rows, triton.cdiv(together, block_heads))](
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        query_weight,
        key_weight,
        qkv.stride(0),
        queries,
        together,
        head_dim // 2,
        epsilon,
        NORMED=norms is not None,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=half,
        num_warps=WARPS,
    )


# Numbers of a row that a program may compute, and those of each of its warps: 8 a thread, a load of 16 bytes.
_BLOCKS = (1024, 512, 256)
NUMBERS_OF_A_WARP = 256

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWO_SQRT_TWO_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit  # type: ignore[untyped-decorator]
def gated_kernel(  # type: ignore[no-untyped-def]
    gate_up,  # [rows, 2 * width]
    out,  # [rows, width], contiguous
    width,
    gate_up_row,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = gate_up + row * gate_up_row + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        twice = _TWO_SQRT_TWO_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(-twice))
    else:
        tl.static_assert(ACTIVATION == "relu")
        activated = tl.where(gate < 0.0, 0.0, gate)  # NaN stays
    tl.store(out + row * width + columns, (activated * up).to(out.dtype.element_ty), mask=inside)


def block_for(width: int) -> int:
    """The largest block that leaves few columns of its programs idle."""
    fitting = (block for block in _BLOCKS if triton.cdiv(width, block) * block * 8 <= width * 9)
    return next(fitting, _BLOCKS[-1])


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    rows, both = gate_up.shape
    width = both // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        block = block_for(width)
        gated_kernel[(rows, triton.cdiv(width, block))](
            gate_up,
            out,
            width,
            gate_up.stride(0),
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=block // NUMBERS_OF_A_WARP,
        )
    return out
