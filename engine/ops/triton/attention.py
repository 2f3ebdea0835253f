"""Launches attention within the sequences of a step: the tiles by what a device offers, and the function on
torch tensors. The kernel is in `attention_kernel.py`, the blocks that it takes come from
`attention_blocks.py`.
"""

from dataclasses import dataclass

import torch

from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.engine.ops.triton.attention_kernel import attention_kernel
from maxsimd.engine.ops.triton.launch import Limits, limits, next_power_of_two

# exp(x) = 2^(x LOG2_E), and powers of two are what the hardware has.
LOG2_E = 1.4426950408889634

LARGEST_HEAD = 256
# Within a tile the kernel counts in 32 bits.
_LARGEST_ROW_STRIDE = 1 << 22


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program works on: a block of `queries` against `keys` at a time, with this many warps and
    stages of prefetched loads, and at most `registers` registers a thread, or as many as the compiler
    takes."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# By the KiB of shared memory that a program may have, and the size of a head, in 16 bits; first those without
# a window. A window of some hundred keys is all edges, of which smaller blocks have fewer.
# `maxsimd.bench.gpu.bounds` says how fast they can be. In a trial on an H100, blocks of 64 queries were
# faster than those of 128 for heads of 64 and 128 numbers, though they read keys and values twice as often.
_TILES = {
    # Compute capability 9.0 and 10.0, of which 9.0 was measured.
    227: (
        {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(64, 16, 4, 2)},
        {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 32, 8, 2)},
    ),
    # 8.0
    163: (
        {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3), 256: Tiles(32, 32, 4, 2)},
        {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3), 256: Tiles(32, 32, 4, 2)},
    ),
    # 8.6, 8.9 and 12.0
    99: (
        {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
        {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
    ),
}
# Float32 is multiplied without tensor cores, which is slow everywhere. Without a number of registers the
# compiler takes fewer for the largest heads, and spills.
_FLOAT32_TILES = {64: Tiles(32, 32, 8, 2), 128: Tiles(16, 16, 4, 1), 256: Tiles(16, 16, 8, 1, 128)}


def tiles_for(device: Limits, head_dim: int, itemsize: int, windowed: bool) -> Tiles:
    """The tiles for a device of these limits and heads of `head_dim` numbers of `itemsize` bytes each."""
    size = max(64, next_power_of_two(head_dim))
    if itemsize > 2:
        return _FLOAT32_TILES[size]
    # Where columns are masked, large blocks leave too few registers.
    small = windowed or (head_dim > 64 and head_dim != size)
    fitting = [needed for needed in _TILES if needed * 1024 <= device.shared_memory]
    return _TILES[max(fitting, default=min(_TILES))][small][size]


def tiles_of(qkv: QKV) -> Tiles:
    """The tiles with which `attention` takes these queries."""
    query = qkv.query
    return tiles_for(limits(query.device), query.shape[-1], query.itemsize, qkv.window is not None)


def is_supported(qkv: QKV) -> bool:
    """Whether the kernel takes heads of this size, and their scaling: it takes maxima before it scales."""
    return qkv.query.shape[-1] == qkv.value.shape[-1] <= LARGEST_HEAD and qkv.scaling > 0


def attention(
    qkv: QKV, blocks: torch.Tensor, causal: bool, out: torch.Tensor, prefix: KV | None = None
) -> None:
    """Attends block by block: `blocks` is int32 [blocks, 5] on the device, cut by `blocks_of` with
    `tiles_of(qkv).queries` and the same `causal`; blocks of no queries are passed over. `is_supported` must
    hold.

    All blocks see the keys and values of the `prefix`, if there is one, before their own. Writes the blocks'
    rows of `out` [rows, heads, head_dim]."""
    heads, _, head_dim = qkv.query.shape
    tiles = tiles_of(qkv)
    if len(blocks) == 0:
        return
    q, k, v = (_close_rows(x) for x in (qkv.query, qkv.key, qkv.value))
    before = (k, v) if prefix is None else tuple(_close_rows(x) for x in prefix)
    attention_kernel[(len(blocks), heads)](
        q, k, v, *before, out, blocks,
        *_strides(q), *_strides(k), *_strides(v), *_strides(before[0]), *_strides(before[1]),
        out.stride(1), out.stride(0),
        0 if prefix is None else prefix.key.shape[1],
        qkv.scaling * LOG2_E, qkv.window or 0, heads // k.shape[0],
        CAUSAL=causal,
        WINDOWED=qkv.window is not None,
        PREFIXED=prefix is not None,
        HEAD_DIM=head_dim,
        BLOCK_Q=tiles.queries,
        BLOCK_K=tiles.keys,
        BLOCK_DIM=next_power_of_two(head_dim),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
    )  # fmt: skip


def _close_rows(x: torch.Tensor) -> torch.Tensor:
    """[heads, rows, head_dim] as the kernel reads it: the numbers of a row side by side, and rows not too far
    apart."""
    return x if x.stride(-1) == 1 and x.stride(1) <= _LARGEST_ROW_STRIDE else x.contiguous()


def _strides(heads_of_rows: torch.Tensor) -> tuple[int, int]:
    return heads_of_rows.stride(0), heads_of_rows.stride(1)
