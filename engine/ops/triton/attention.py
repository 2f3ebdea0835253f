"""Attention within the sequences of a step as a Triton kernel with an online softmax: nothing is padded, and
no attention weight is written to memory.

Source of the recurrence: FlashAttention-2, Dao 2023 (arXiv 2307.08691). Each program takes a block of one
sequence's queries and one head, and walks over the keys that these queries may see: first those of a prefix
that many sequences share, if there is one, then the sequence's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.engine.ops.triton.launch import generation, next_power_of_two
from maxsimd.engine.ops.triton.product import add_product

if TYPE_CHECKING:
    from numpy.typing import NDArray

# exp(x) = 2^(x LOG2_E), and powers of two are what the hardware has.
LOG2_E = 1.4426950408889634

LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program works on: a block of `queries` against `keys` at a time, with this many warps and
    stages of prefetched loads."""

    queries: int
    keys: int
    warps: int
    stages: int


# By the bytes of one row of a head, for compute capability 9 and above (227 KiB of shared memory).
_TILES = {
    128: Tiles(128, 64, 4, 3),
    256: Tiles(128, 64, 8, 2),
    512: Tiles(64, 32, 4, 2),
    1024: Tiles(32, 16, 4, 2),
}
# For all others: consumer cards of compute capability 8 have 99 KiB.
_SMALL_TILES = {
    128: Tiles(64, 64, 4, 2),
    256: Tiles(64, 32, 4, 2),
    512: Tiles(32, 32, 4, 1),
    1024: Tiles(16, 16, 4, 1),
}


@triton.jit  # type: ignore[untyped-decorator]
def _over_keys(  # type: ignore[no-untyped-def]
    attended,  # float32 [BLOCK_Q, BLOCK_DIM]
    total,  # float32 [BLOCK_Q]
    highest,  # float32 [BLOCK_Q]
    query,  # [BLOCK_Q, BLOCK_DIM]
    query_position,  # int32 [BLOCK_Q]
    k,
    v,
    k_row,
    v_row,
    start,
    stop,
    key_position,
    scale,
    window,
    head_dim,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One pass of the online softmax over keys `start` to `stop`, where key 0 is at position `key_position`.

    For each query, `highest` is the largest weight so far (in powers of two), `total` the sum of 2^(weight -
    highest), and `attended` the sum of values with these weights. Whenever a block of keys raises `highest`,
    what was summed before is scaled down to the new maximum. Dividing `attended` by `total` at the end gives
    the attention over all keys."""
    columns = tl.arange(0, BLOCK_DIM)
    in_dim = columns < head_dim
    nothing = tl.zeros((query.shape[0], BLOCK_K), tl.float32)
    for first in range(start, stop, BLOCK_K):
        rows = first + tl.arange(0, BLOCK_K)
        there = rows < stop
        inside = there[:, None] & in_dim[None, :]
        at = rows[:, None].to(tl.int64)
        key = tl.load(k + at * k_row + columns[None, :], mask=inside, other=0.0)
        weight = add_product(nothing, query, tl.trans(key)) * scale
        seen = there[None, :]
        ahead = (key_position + rows)[None, :] - query_position[:, None]
        if CAUSAL:
            seen = seen & (ahead <= 0)
        elif WINDOWED:
            seen = seen & (ahead < window)
        if WINDOWED:
            seen = seen & (-ahead < window)
        weight = tl.where(seen, weight, float("-inf"))
        higher = tl.maximum(highest, tl.max(weight, axis=1))
        # A query that has seen no key yet has -inf here, and -inf minus -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(weight - base[:, None])
        shrunk = tl.exp2(highest - base)
        total = total * shrunk + tl.sum(share, axis=1)
        value = tl.load(v + at * v_row + columns[None, :], mask=inside, other=0.0)
        attended = add_product(attended * shrunk[:, None], share.to(value.dtype), value)
        highest = higher
    return attended, total, highest


@triton.jit(do_not_specialize=("prefix_keys",))  # type: ignore[untyped-decorator]
def attention_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    prefix_k,
    prefix_v,
    out,
    blocks,  # int32 [blocks, 5], see `blocks_of`
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    prefix_k_head,
    prefix_k_row,
    prefix_v_head,
    prefix_v_row,
    out_head,
    out_row,
    prefix_keys,
    scale,  # times log2(e)
    window,
    head_dim,
    repeats,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PREFIXED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Program (block of queries, head)."""
    block = blocks + tl.program_id(0) * 5
    first_row = tl.load(block)
    queries = tl.load(block + 1)
    first_position = tl.load(block + 2)
    first_key = tl.load(block + 3)
    keys = tl.load(block + 4)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // repeats

    within = tl.arange(0, BLOCK_Q)
    position = first_position + within
    last_position = first_position + queries - 1
    rows = (first_row + within)[:, None].to(tl.int64)
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (within < queries)[:, None] & (columns < head_dim)
    query = tl.load(q + head * q_head + rows * q_row + columns, mask=inside, other=0.0)

    attended = tl.zeros((BLOCK_Q, BLOCK_DIM), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    highest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    if PREFIXED:
        start = 0
        if WINDOWED:
            start = tl.maximum(0, first_position - window + 1)
        attended, total, highest = _over_keys(
            attended, total, highest, query, position,
            prefix_k + kv_head * prefix_k_head, prefix_v + kv_head * prefix_v_head,
            prefix_k_row, prefix_v_row, start, prefix_keys, 0, scale, window, head_dim,
            CAUSAL, WINDOWED, BLOCK_K, BLOCK_DIM,
        )  # fmt: skip
    start, stop = 0, keys
    if CAUSAL:
        stop = tl.minimum(keys, last_position + 1 - prefix_keys)
    elif WINDOWED:
        stop = tl.minimum(keys, last_position + window - prefix_keys)
    if WINDOWED:
        start = tl.maximum(0, first_position - window + 1 - prefix_keys)
    first_key = first_key.to(tl.int64)
    attended, total, highest = _over_keys(
        attended, total, highest, query, position,
        k + kv_head * k_head + first_key * k_row, v + kv_head * v_head + first_key * v_row, k_row, v_row,
        start, stop, prefix_keys, scale, window, head_dim, CAUSAL, WINDOWED, BLOCK_K, BLOCK_DIM,
    )  # fmt: skip
    # Attention over nothing is 0.
    result = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + head * out_head + rows * out_row + columns, result.to(out.dtype.element_ty), mask=inside)


def is_supported(qkv: QKV) -> bool:
    """Whether the kernel takes heads of this size."""
    return qkv.query.shape[-1] == qkv.value.shape[-1] <= LARGEST_HEAD


def tiles_for(device: torch.device, head_dim: int, itemsize: int) -> Tiles:
    """The tiles for a device and heads of `head_dim` numbers of `itemsize` bytes each."""
    row = max(128, next_power_of_two(head_dim) * itemsize)
    return (_TILES if generation(device) >= 9 else _SMALL_TILES)[row]


def blocks_of(
    sequences: "Sequence[tuple[int, int, int, int]] | NDArray[np.int64]",
    causal: bool,
    prefix_keys: int,
    queries: int,
) -> "NDArray[np.int32]":
    """Cuts sequences (first row, queries, first key, keys) into blocks of at most `queries` queries.

    Each block is (first row, queries, position of its first query, first key, keys): int32 [blocks, 5]. The
    blocks that see the most keys come first. Positions count from the first key of the prefix; causal queries
    are the last of their sequence's keys."""
    table = np.asarray(sequences, dtype=np.int64).reshape(-1, 4)
    counts = -(-table[:, 1] // queries)
    owner = np.repeat(np.arange(len(table)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    row, length, key, keys = table[owner].T
    position = first + (prefix_keys + (keys - length if causal else 0))
    taken = np.minimum(queries, length - first)
    seen = np.minimum(keys, position + taken - prefix_keys) if causal else keys
    blocks = np.stack([row + first, taken, position, key, keys], axis=1)
    return np.ascontiguousarray(blocks[np.argsort(-seen, kind="stable")], dtype=np.int32)


def attention(
    qkv: QKV, blocks: torch.Tensor, causal: bool, out: torch.Tensor, prefix: KV | None = None
) -> None:
    """Attends block by block: `blocks` is int32 [blocks, 5] on the device, cut by `blocks_of` with
    `tiles_for(...).queries` and the same `causal`.

    All blocks see the keys and values of the `prefix`, if there is one, before their own. Writes the blocks'
    rows of `out` [rows, heads, head_dim]."""
    heads, _, head_dim = qkv.query.shape
    tiles = tiles_for(qkv.query.device, head_dim, qkv.query.itemsize)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (qkv.query, qkv.key, qkv.value))
    before = KV(k[:, :0], v[:, :0]) if prefix is None else prefix
    before_k, before_v = (x if x.stride(-1) == 1 else x.contiguous() for x in before)
    if len(blocks) == 0:
        return
    attention_kernel[(len(blocks), heads)](
        q, k, v, before_k, before_v, out, blocks,
        *_strides(q), *_strides(k), *_strides(v), *_strides(before_k), *_strides(before_v),
        out.stride(1), out.stride(0),
        before_k.shape[1], qkv.scaling * LOG2_E, qkv.window or 0, head_dim, heads // k.shape[0],
        CAUSAL=causal,
        WINDOWED=qkv.window is not None,
        PREFIXED=prefix is not None,
        BLOCK_Q=tiles.queries,
        BLOCK_K=tiles.keys,
        BLOCK_DIM=next_power_of_two(head_dim),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip


def _strides(heads_of_rows: torch.Tensor) -> tuple[int, int]:
    return heads_of_rows.stride(0), heads_of_rows.stride(1)
