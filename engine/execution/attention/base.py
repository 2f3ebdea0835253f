"""Attention within each sequence of a packed step, registered with transformers under one name.

`attend` is called by every layer of the model with the step's layout among its keyword arguments. It hands
the parts of a step to a `PackedAttention`, of which there are several.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from maxsimd.engine.execution.layout import Arrangement, Layout
from maxsimd.scheduler import Chunk

NAME = "maxsimd_packed"
# (queries, keys, values [heads, rows, head_dim], layout, scaling, window) -> [rows, heads, head_dim]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout, float, int | None], torch.Tensor]
# (queries, keys, values, layout, scaling) -> as above, where only each sequence's first row is defined
FirstRowsAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout, float], torch.Tensor]
# Keys and values [kv_heads, length, head_dim] of the prefix of each of a layout's shared groups
Prefixes = list[tuple[torch.Tensor, torch.Tensor]]
# (queries, keys, values, layout, prefixes, scaling, window, output) -> the shared groups' rows of the output
SharedAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Layout, Prefixes, float, int | None, torch.Tensor], None
]
# (a chunk's queries [heads, tokens, head_dim], all keys and values so far, layout, scaling, window) ->
# [tokens, heads, head_dim]; the queries are those of the last keys
ChunkAttention = Attention
# (layout of whole sequences, number of sequences) -> what `Layout.masks` must hold, on the host, filled up to
# so many sequences
Tables = Callable[[Layout, int], dict[object, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """One way to attend within the sequences of a step: those that are whole, chunks of a cut one, and those
    that share a prefix; and the arrangement of rows that it wants. Without `first_rows`, a last layer that is
    needed for these alone is computed whole. Not all know float32. With `tables` it may be captured in a CUDA
    graph."""

    name: str
    everywhere: Attention
    first_rows: FirstRowsAttention | None
    chunk: ChunkAttention
    after_prefix: SharedAttention
    arrangement: Arrangement
    knows_float32: bool
    tables: Tables | None = None


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    attention: PackedAttention | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query, key and value are [1, heads, rows, head_dim].

    Returns [1, rows, heads, head_dim]. Features that are not understood raise, so that the proof at load
    fails and the model is run padded."""
    if layout is None or attention is None:
        raise RuntimeError("packed attention was called outside of a packed step")
    if (
        kwargs.get("softcap") is not None
        or kwargs.get("s_aux") is not None
        or kwargs.get("position_bias") is not None
    ):
        raise NotImplementedError("packed attention knows neither softcap, sinks nor position bias")
    q, k, v = query[0], key[0], value[0]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    carried = [
        (rows, *carry.extend(module.layer_idx, chunk.start, k[:, rows], v[:, rows], _keeps(chunk)))
        for chunk, rows, carry in layout.carried
    ]
    if layout.gate is not None and layout.gate.belongs_to(module):
        assert attention.first_rows is not None
        return attention.first_rows(q, k, v, layout, scale)[None], None
    if not carried and not layout.shared:
        return attention.everywhere(q, k, v, layout, scale, sliding_window)[None], None
    out = torch.empty(q.shape[1], q.shape[0], v.shape[-1], dtype=q.dtype, device=q.device)
    if layout.groups:
        stop = layout.groups[-1].rows.stop
        out[:stop] = attention.everywhere(
            q[:, :stop], k[:, :stop], v[:, :stop], layout, scale, sliding_window
        )
    for rows, keys, values in carried:
        out[rows] = attention.chunk(q[:, rows], keys, values, layout, scale, sliding_window)
    if layout.shared:
        whole = {
            prefix: prefix.whole(module.layer_idx) for prefix in {group.prefix for group in layout.shared}
        }
        prefixes = [whole[group.prefix] for group in layout.shared]
        attention.after_prefix(q, k, v, layout, prefixes, scale, sliding_window, out)
    return out[None], None


def _keeps(chunk: Chunk) -> bool:
    """Whether a chunk's keys and values are needed after its step."""
    return chunk.is_prefix or not chunk.is_last


def register() -> None:
    """Makes the function known to transformers. It is not registered for masks: for a name that is not known
    there, transformers makes none, and the layout says it all."""
    AttentionInterface.register(NAME, attend)
