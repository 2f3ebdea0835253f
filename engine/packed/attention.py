"""Attention within each sequence of a packed step, registered with transformers under one name.

`attend` is called by every layer of the model with the step's layout among its keyword arguments. For each
device there is one way to do it; `attend_one_by_one` is the plain one that the others are tested against.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from maxsimd.engine.packed.layout import ROW_MULTIPLE, Arrangement, Group, Layout, SharedGroup
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


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """One way to attend within the sequences of a step, and the arrangement of rows that it wants. Without
    `first_rows`, a last layer that is needed for these alone is computed whole."""

    everywhere: Attention
    first_rows: FirstRowsAttention | None
    after_prefix: SharedAttention
    arrangement: Arrangement


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
        out[rows] = _attend_chunk(q[:, rows], keys, values, scale, sliding_window).transpose(0, 1)
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
    """Makes the function known to transformers, with no mask of its own: the layout says it all."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def attend_one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """The plain reference: `scaled_dot_product_attention` for each sequence by itself."""
    out = torch.zeros(q.shape[1], q.shape[0], v.shape[-1], dtype=q.dtype, device=q.device)
    for group in layout.groups:
        for i, keys in enumerate(group.key_lengths):
            start = group.first_row + i * group.length
            rows, seen = slice(start, start + group.length), slice(start, start + keys)
            mask = visible(group.length, keys, layout.causal, window, q.device)
            kk, vv = _repeat_heads(k[:, seen], q), _repeat_heads(v[:, seen], q)
            out[rows] = F.scaled_dot_product_attention(q[:, rows], kk, vv, mask, scale=scale).transpose(0, 1)
    return out


def attend_grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """For the CPU: one batched product a group of like length, softmax, one batched product."""
    heads, rows, _ = q.shape
    out = torch.empty(rows, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    for group in layout.groups:
        qq, kk, vv = (_of_group(x, group) for x in (q, k, v))
        if layout.causal:
            attended = _causal_group(qq, kk, vv, group.length, scale, window)
        else:
            attended = _bidirectional_group(qq, kk, vv, group, layout, scale, window)
        out[group.rows].unflatten(0, (group.count, group.length)).copy_(attended.transpose(1, 2))
    out[layout.groups[-1].rows.stop :] = 0
    return out


def attend_first_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
) -> torch.Tensor:
    """As `attend_grouped`, but only for the first token of each sequence; other rows are left undefined."""
    heads, rows, _ = q.shape
    out = torch.empty(rows, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    for group in layout.groups:
        qq, kk, vv = (_of_group(x, group) for x in (q, k, v))
        attended = _bidirectional_group(qq[:, :, :1], kk, vv, group, layout, scale, None)
        out[group.rows].unflatten(0, (group.count, group.length))[:, 0] = attended[:, :, 0]
    return out


def attend_groups_after_prefix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    prefixes: Prefixes,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """What shares a prefix, a group of like length at a time."""
    for group, prefix in zip(layout.shared, prefixes, strict=True):
        qq, kk, vv = (_of_group(x, group) for x in (q, k, v))
        attended = _attend_after_prefix(qq, kk, vv, *prefix, scale, window)
        out[group.rows].unflatten(0, (group.count, group.length)).copy_(attended.transpose(1, 2))


def _attend_after_prefix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Queries [n, heads, tokens, head_dim] against one prefix [kv_heads, before, head_dim] and then each
    against its own keys; as many out as in."""
    n, _, tokens, _ = q.shape
    keys = torch.cat([prefix_keys.expand(n, -1, -1, -1), k], dim=2)
    values = torch.cat([prefix_values.expand(n, -1, -1, -1), v], dim=2)
    mask = visible(tokens, keys.shape[2], True, window, q.device)
    grouped_heads = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=grouped_heads)


def _of_group(x: torch.Tensor, group: Group | SharedGroup) -> torch.Tensor:
    """A group's part of [heads, rows, head_dim], as a view [n, heads, length, head_dim]."""
    part: torch.Tensor = x[:, group.rows].unflatten(1, (group.count, group.length))
    return part.transpose(0, 1)


def _bidirectional_group(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    layout: Layout,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Queries [n, heads, tokens, head_dim] of a group against its keys and values; as many out as in."""
    n, heads, tokens, head_dim = q.shape
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    keys = k.shape[2]
    # One product over all sequences and heads, with the scaling in it.
    weights = torch.baddbmm(
        q.new_empty(n * heads, tokens, keys),
        q.reshape(n * heads, tokens, head_dim),
        k.reshape(n * heads, keys, head_dim).transpose(1, 2),
        beta=0,
        alpha=scale,
    ).unflatten(0, (n, heads))  # [n, heads, tokens, keys]
    values = v.reshape(n * heads, keys, v.shape[-1])
    _hide(weights, group, layout, window)
    attended: torch.Tensor = torch.bmm(torch.softmax(weights, dim=-1).flatten(0, 1), values)
    attended = attended.view(n, heads, tokens, -1)
    _clear_blind_rows(attended, group, window)
    return attended


def _causal_group(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, scale: float, window: int | None
) -> torch.Tensor:
    """Padding stands at the end, where no real token of a causal model can see it."""
    grouped_heads = k.shape[1] != q.shape[1]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped_heads)
    mask = visible(length, length, True, window, q.device)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped_heads)


def _hide(weights: torch.Tensor, group: Group, layout: Layout, window: int | None) -> None:
    """Takes out of `weights` [n, heads, length, length] the keys that must not be seen.

    Only the columns from the shortest sequence's end on can be padding, so only they are touched."""
    length, shortest = group.length, min(group.key_lengths)
    low = torch.finfo(weights.dtype).min
    if shortest < length:
        hidden = layout.masks.get(group)
        if hidden is None:
            keys = torch.tensor(group.key_lengths, device=weights.device)
            columns = torch.arange(shortest, length, device=weights.device)
            hidden = (columns[None, :] >= keys[:, None])[:, None, None, :]
            layout.masks[group] = hidden
        weights[..., shortest:].masked_fill_(hidden, low)
    if window is not None and window < length:
        seen = visible(length, length, False, window, weights.device)
        if seen is not None:
            weights.masked_fill_(~seen, low)


def _clear_blind_rows(attended: torch.Tensor, group: Group, window: int | None) -> None:
    """Zeroes rows of [n, heads, tokens, head_dim] whose window holds no key that may be seen, which is what
    attention over nothing gives. Such are tokens that fill up a query, far behind its attended ones."""
    tokens = attended.shape[2]
    if window is None or min(group.key_lengths) + window > tokens:
        return
    first_blind = torch.tensor(group.key_lengths, device=attended.device) + (window - 1)
    blind = torch.arange(tokens, device=attended.device)[None, :] >= first_blind[:, None]
    attended.masked_fill_(blind[:, None, :, None], 0)


def _attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """A chunk [heads, tokens, head_dim] against its own and all earlier keys."""
    tokens, keys = q.shape[1], k.shape[1]
    mask = visible(tokens, keys, True, window, q.device)
    return F.scaled_dot_product_attention(
        q[None], _repeat_heads(k, q)[None], _repeat_heads(v, q)[None], mask, scale=scale
    )[0]


def visible(
    tokens: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Which keys each token sees, as bool [tokens, keys], or None for all of them.

    Causal tokens are the last of the keys' sequence; a window counts as transformers' masks count it."""
    row = torch.arange(tokens, device=device)[:, None]
    column = torch.arange(keys, device=device)[None, :]
    if causal:
        row = row + (keys - tokens)
        seen = column <= row
        return seen if window is None else seen & (column > row - window)
    # ModernBERT hands its layers the half-window plus one; its mask sees distances up to the half-window.
    return None if window is None else (row - column).abs() < window


def _repeat_heads(kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values [..., kv_heads, tokens, head_dim] repeated for grouped-query attention."""
    repeats = q.shape[-3] // kv.shape[-3]
    return kv if repeats == 1 else kv.repeat_interleave(repeats, dim=-3)


GROUPED = PackedAttention(
    attend_grouped, attend_first_rows, attend_groups_after_prefix, Arrangement(True, True, ROW_MULTIPLE)
)
