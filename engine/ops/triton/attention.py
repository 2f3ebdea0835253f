"""Attention within the sequences of a step as a Triton kernel: an online softmax over blocks of keys, in
which no weight is written to memory. `blocks_of` splits sequences into blocks of queries."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.engine.ops.triton.launch import Limits, limits, next_power_of_two
from maxsimd.engine.ops.triton.projection import add_product


@triton.jit  # type: ignore[untyped-decorator]
def _over_block(  # type: ignore[no-untyped-def]
    attended,  # float32 [BLOCK_Q, BLOCK_DIM]
    total,  # float32 [BLOCK_Q]
    highest,  # float32 [BLOCK_Q]
    query,  # [BLOCK_Q, BLOCK_DIM]
    first_position,  # of the queries
    k,
    v,
    k_row,
    v_row,
    first,
    stop,
    key_position,
    scale,
    window,
    EDGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One turn of the online softmax, over the keys `first` to `first + BLOCK_K`.

    For each query, `highest` is the largest weight so far (in powers of two), `total` the sum of 2^(weight -
    highest), and `attended` the sum of values with these weights. Whenever a block of keys raises `highest`,
    what was summed before is scaled down to the new maximum. A weight is a product times `scale`, which is
    positive, so that the maximum may be taken first and the rest is one multiply-add a weight. At an `EDGE`
    some query may not see some key, and keys from `stop` on are not there."""
    keys = first + tl.arange(0, BLOCK_K)
    there = keys < stop
    within = tl.arange(0, BLOCK_K)[:, None]
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    inside = there[:, None]
    if HEAD_DIM != BLOCK_DIM:
        inside = inside & (columns < HEAD_DIM)
    at = tl.cast(first, tl.int64)
    key_at = k + at * k_row + within * k_row + columns
    # A load without a mask is fewer instructions.
    if EDGE or HEAD_DIM != BLOCK_DIM:  # noqa: SIM108
        key = tl.load(key_at, mask=inside, other=0.0)
    else:
        key = tl.load(key_at)
    product = add_product(tl.zeros((query.shape[0], BLOCK_K), tl.float32), query, tl.trans(key))
    if EDGE:
        seen = there[None, :]
        # Worked out here, so that the loop without edges has the registers for itself.
        position = first_position + tl.arange(0, query.shape[0])
        ahead = (key_position + keys)[None, :] - position[:, None]
        if CAUSAL:
            seen = seen & (ahead <= 0)
        elif WINDOWED:
            seen = seen & (ahead < window)
        if WINDOWED:
            seen = seen & (-ahead < window)
        product = tl.where(seen, product, float("-inf"))
    higher = tl.maximum(highest, tl.max(product, axis=1) * scale)
    base = higher
    if EDGE and WINDOWED:
        # A query that has seen no key yet has -inf here, and -inf minus -inf would be NaN. Without a window
        # every query sees key 0.
        base = tl.where(higher == float("-inf"), 0.0, higher)
    share = tl.exp2(product * scale - base[:, None])
    shrunk = tl.exp2(highest - base)
    total = total * shrunk + tl.sum(share, axis=1)
    value_at = v + at * v_row + within * v_row + columns
    if EDGE or HEAD_DIM != BLOCK_DIM:  # noqa: SIM108
        value = tl.load(value_at, mask=inside, other=0.0)
    else:
        value = tl.load(value_at)
    attended = add_product(attended * shrunk[:, None], share.to(value.dtype), value)
    return attended, total, higher


@triton.jit  # type: ignore[untyped-decorator]
def _over_keys(  # type: ignore[no-untyped-def]
    attended,
    total,
    highest,
    query,
    first_position,
    last_position,
    k,
    v,
    k_row,
    v_row,
    start,
    stop,
    key_position,
    scale,
    window,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The keys `start` to `stop`, where key 0 is at position `key_position` and the queries are at
    `first_position` to `last_position`: first the blocks whose keys all queries see, without a mask, then
    those at the edges."""
    first_full, full_stop = start, stop
    if WINDOWED:
        before = tl.maximum(0, last_position - window + 1 - key_position - start)
        first_full = start + tl.cdiv(before, BLOCK_K) * BLOCK_K
    if CAUSAL:
        full_stop = tl.minimum(stop, first_position + 1 - key_position)
    elif WINDOWED:
        full_stop = tl.minimum(stop, first_position + window - key_position)
    full = tl.maximum(0, full_stop - first_full) // BLOCK_K * BLOCK_K
    for first in range(first_full, first_full + full, BLOCK_K):
        attended, total, highest = _over_block(
            attended, total, highest, query, first_position, k, v, k_row, v_row, first, stop, key_position,
            scale, window, False, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_K, BLOCK_DIM,
        )  # fmt: skip
    for edge in tl.range(start, stop - full, BLOCK_K, num_stages=None if WINDOWED else 1):
        first = edge + tl.where(edge >= first_full, full, 0)
        attended, total, highest = _over_block(
            attended, total, highest, query, first_position, k, v, k_row, v_row, first, stop, key_position,
            scale, window, True, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_K, BLOCK_DIM,
        )  # fmt: skip
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
    scale,  # positive, times log2(e)
    window,
    repeats,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PREFIXED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Program (block of queries, head)."""
    block = blocks + tl.program_id(0) * 5
    first_row = tl.load(block)
    queries = tl.load(block + 1)
    # Tables of captured launches are filled up with blocks of no queries.
    if queries == 0:
        return
    first_position = tl.load(block + 2)
    first_key = tl.load(block + 3).to(tl.int64)
    keys = tl.load(block + 4)
    head = tl.program_id(1).to(tl.int64)
    kv_head = (tl.program_id(1) // repeats).to(tl.int64)

    within = tl.arange(0, BLOCK_Q)
    last_position = first_position + queries - 1
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (within < queries)[:, None] & (columns < HEAD_DIM)
    row = first_row.to(tl.int64)
    query_at = q + head * q_head + row * q_row + within[:, None] * q_row + columns
    query = tl.load(query_at, mask=inside, other=0.0)

    attended = tl.zeros((BLOCK_Q, BLOCK_DIM), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    highest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    if PREFIXED:
        start = 0
        if WINDOWED:
            start = tl.maximum(0, first_position - window + 1)
        # Without a causal mask: keys in front of a query are in front of all queries.
        attended, total, highest = _over_keys(
            attended, total, highest, query, first_position, last_position,
            prefix_k + kv_head * prefix_k_head, prefix_v + kv_head * prefix_v_head,
            prefix_k_row, prefix_v_row, start, prefix_keys, 0, scale, window,
            False, WINDOWED, HEAD_DIM, BLOCK_K, BLOCK_DIM,
        )  # fmt: skip
    start, stop = 0, keys
    if CAUSAL:
        stop = tl.minimum(keys, last_position + 1 - prefix_keys)
    elif WINDOWED:
        stop = tl.minimum(keys, last_position + window - prefix_keys)
    if WINDOWED:
        start = tl.maximum(0, first_position - window + 1 - prefix_keys)
    attended, total, highest = _over_keys(
        attended, total, highest, query, first_position, last_position,
        k + kv_head * k_head + first_key * k_row, v + kv_head * v_head + first_key * v_row, k_row, v_row,
        start, stop, prefix_keys, scale, window, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_K, BLOCK_DIM,
    )  # fmt: skip
    # Attention over nothing is 0.
    result = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    at = out + head * out_head + row * out_row + within[:, None] * out_row + columns
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)


# exp(x) = 2^(x LOG2_E), and powers of two are what the hardware has.
LOG2_E = 1.4426950408889634

LARGEST_HEAD = 256
# Within a tile the kernel counts in 32 bits.
_LARGEST_ROW_STRIDE = 1 << 22


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of a program: a block of `queries` against `keys` at a time, its warps, the stages of
    prefetched loads, and the most registers a thread, None for the compiler's choice."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# For 16 bits, by the KiB of shared memory of a program and the size of a head; first without a window, then
# with one: smaller blocks have fewer edges. On an H100, blocks of 64 queries were faster than those of 128,
# though they read keys and values twice as often. `maxsimd.bench.gpu.ahead_of_time` says how fast they can
# be.
_TILES = {
    # Compute capability 9.0 and 10.0, of which 9.0 was measured.
    227: (
        {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(64, 16, 4, 2)},
        {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 32, 8, 2)},
    ),
    # 8.0
    163: ({64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3), 256: Tiles(32, 32, 4, 2)},) * 2,
    # 8.6, 8.9 and 12.0
    99: ({64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},) * 2,
}
# Float32 is multiplied without tensor cores, which is slow everywhere. Without a number of registers the
# compiler takes fewer for the largest heads, and spills.
_FLOAT32_TILES = {64: Tiles(32, 32, 8, 2), 128: Tiles(16, 16, 4, 1), 256: Tiles(16, 16, 8, 1, 128)}


def tiles_for(device: Limits, head_dim: int, itemsize: int, windowed: bool) -> Tiles:
    """The tiles for a device of these limits and heads of `head_dim` numbers of `itemsize` bytes each."""
    size = max(64, next_power_of_two(head_dim))
    if itemsize > 2:
        return _FLOAT32_TILES[size]
    # With masked columns, large blocks leave too few registers.
    small = windowed or (head_dim > 64 and head_dim != size)
    fitting = [needed for needed in _TILES if needed * 1024 <= device.shared_memory]
    return _TILES[max(fitting, default=min(_TILES))][small][size]


def tiles_of(qkv: QKV) -> Tiles:
    """The tiles of `attention` for these queries."""
    query = qkv.query
    return tiles_for(limits(query.device), query.shape[-1], query.itemsize, qkv.window is not None)


def is_supported(qkv: QKV) -> bool:
    """Whether the kernel takes this head size and scaling: it takes maxima before it scales."""
    return qkv.query.shape[-1] == qkv.value.shape[-1] <= LARGEST_HEAD and qkv.scaling > 0


def attention(
    qkv: QKV, blocks: torch.Tensor, causal: bool, out: torch.Tensor, prefix: KV | None = None
) -> None:
    """Attends block by block: `blocks` is int32 [blocks, 5] on the device, made by `blocks_of` with
    `tiles_of(qkv).queries` and the same `causal`; empty blocks are skipped. `is_supported` must hold.

    All blocks see the `prefix`, if any, before their own keys. Writes their rows of `out` [rows, heads,
    head_dim]."""
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
    """[heads, rows, head_dim] for the kernel: the numbers of a row side by side, rows not too far apart."""
    return x if x.stride(-1) == 1 and x.stride(1) <= _LARGEST_ROW_STRIDE else x.contiguous()


def _strides(heads_of_rows: torch.Tensor) -> tuple[int, int]:
    return heads_of_rows.stride(0), heads_of_rows.stride(1)
