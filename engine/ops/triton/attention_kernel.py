"""The kernel of attention within the sequences of a step: nothing is padded, and no attention weight is
written to memory. `attention.py` launches it.

Source of the recurrence: FlashAttention-2, Dao 2023 (arXiv 2307.08691). Each program takes a block of one
sequence's queries and one head, and walks over the keys that these queries may see: first those of a prefix
that many sequences share, if there is one, then the sequence's own.
"""

import triton
import triton.language as tl

from maxsimd.engine.ops.triton.product import add_product


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
        # Not causal: what stands in front of a query is in front of all of them.
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
