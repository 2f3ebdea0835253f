"""Packed attention by our Triton kernel: any precision, any mixture of lengths, prefixes and chunks."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.execution.attention.base import PackedAttention, Prefixes
from maxsimd.engine.execution.attention.torch_grouped import (
    attend_chunk,
    attend_grouped,
    attend_groups_after_prefix,
)
from maxsimd.engine.execution.layout import Arrangement, Layout
from maxsimd.engine.ops.triton.attention import attention, blocks_of, is_supported, tiles_for
from maxsimd.pooling.transfer import to_device

# First row, queries, first key and keys of each sequence: int64 [n, 4].
_Table = NDArray[np.int64]


def attend_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """One launch over all sequences; heads of a size that it does not know go the plain way."""
    if not is_supported(q, v):
        return attend_grouped(q, k, v, layout, scale, window)
    out = q.new_empty(q.shape[1], q.shape[0], v.shape[-1])
    blocks = _blocks(layout, "whole", lambda: _whole(layout), 0, q)
    attention(q, k, v, blocks, scale, layout.causal, window, out)
    return out


def attend_chunk_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """One launch over the queries of a chunk."""
    if not is_supported(q, v):
        return attend_chunk(q, k, v, layout, scale, window)
    tokens, keys = q.shape[1], k.shape[1]
    out = q.new_empty(tokens, q.shape[0], v.shape[-1])
    blocks = _blocks(layout, (tokens, keys), lambda: np.array([[0, tokens, 0, keys]]), 0, q)
    attention(q, k, v, blocks, scale, True, window, out)
    return out


def attend_after_prefix_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    prefixes: Prefixes,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """One launch over all sequences that share a prefix."""
    if not is_supported(q, v):
        attend_groups_after_prefix(q, k, v, layout, prefixes, scale, window, out)
        return
    whole = {group.prefix: prefix for group, prefix in zip(layout.shared, prefixes, strict=True)}
    for carry, prefix in whole.items():
        groups = [group for group in layout.shared if group.prefix is carry]
        table = lambda groups=groups: np.array(  # noqa: E731
            [
                (
                    group.first_row + i * group.length,
                    group.length,
                    group.first_row + i * group.length,
                    group.length,
                )
                for group in groups
                for i in range(group.count)
            ]
        )
        blocks = _blocks(layout, carry, table, prefix[0].shape[1], q)
        attention(q, k, v, blocks, scale, True, window, out, prefix)


def _whole(layout: Layout) -> _Table:
    return np.array(
        [
            (group.first_row + i * group.length, group.length, group.first_row + i * group.length, keys)
            for group in layout.groups
            for i, keys in enumerate(group.key_lengths)
        ]
    )


def _blocks(
    layout: Layout, of: object, table: Callable[[], _Table], prefix_keys: int, q: torch.Tensor
) -> torch.Tensor:
    """The blocks of some sequences of a step, worked out and copied once for all layers."""
    queries = tiles_for(q.device, q.shape[-1], q.itemsize).queries
    key = ("blocks", of, queries)
    blocks = layout.masks.get(key)
    if blocks is None:
        causal = layout.causal or of != "whole"
        blocks = to_device(blocks_of(table(), causal, prefix_keys, queries), q.device)
        layout.masks[key] = blocks
    return blocks


# One query a sequence would mean one block a sequence and head, so there is nothing for first rows alone.
TRITON = PackedAttention(
    "triton",
    attend_triton,
    None,
    attend_chunk_triton,
    attend_after_prefix_triton,
    Arrangement(groups_whole=False, groups_shared=False, row_multiple=1),
    knows_float32=True,
)
