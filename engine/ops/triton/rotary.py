"""Rotary position embedding of queries and keys, after the norm of each head if the model has one, as one
Triton kernel that works where the product of queries, keys and values has written them.

Bytes a row in 16 bits: 2 `head_dim` for each head of queries and keys, read and written once; values are not
touched. Cosines and sines of a row are read once for each few heads, out of the caches. Sources of the
formulas: Su et al. 2021 (arXiv 2104.09864), equation 34, with halves in place of neighbours as in
transformers; the norm of heads as in Qwen3 (arXiv 2505.09388), section 2.

Order of roundings: norm and rotation are float32, and the result is rounded once. transformers rounds after
the norm, after the product with its weight, after both products of the rotation, and after their sum.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.elementwise import HeadNorms
from maxsimd.engine.ops.triton.launch import next_power_of_two

# Numbers that a program of two warps holds: 16 a thread.
_NUMBERS = 1024
WARPS = 2


@dataclass(frozen=True, slots=True)
class Blocks:
    """What one program works on: a number of `heads`, whose halves are padded to `half` numbers."""

    heads: int
    half: int


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
    turned_first = first * cos_first - second * sin_first
    turned_second = second * cos_second + first * sin_second
    tl.store(at, turned_first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(at + half, turned_second.to(qkv.dtype.element_ty), mask=inside)


def blocks_for(heads: int, head_dim: int) -> Blocks:
    """The blocks for rows of that many heads of queries and keys together."""
    half = next_power_of_two(head_dim // 2)
    return Blocks(min(next_power_of_two(heads), _NUMBERS // (2 * half)), half)


def norm_rotary_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    norms: HeadNorms | None,
) -> None:
    """Norms and turns in place the queries and keys in `qkv` [rows, all heads, head_dim], of which the first
    `heads[0]` are queries and the next `heads[1]` keys; `cos` and `sin` are [rows, head_dim]."""
    rows, _, head_dim = qkv.shape
    if rows == 0:
        return
    queries, together = heads[0], sum(heads)
    blocks = blocks_for(together, head_dim)
    norms_or_none = (qkv, qkv, 0.0) if norms is None else (norms.query, norms.key, norms.epsilon)
    norm_rotary_kernel[(rows, triton.cdiv(together, blocks.heads))](
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        *norms_or_none[:2],
        qkv.stride(0),
        queries,
        together,
        head_dim // 2,
        norms_or_none[2],
        NORMED=norms is not None,
        BLOCK_HEADS=blocks.heads,
        BLOCK_HALF=blocks.half,
        num_warps=WARPS,
    )
