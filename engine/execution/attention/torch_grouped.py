"""Packed attention in plain torch, on any device.

`attend_one_by_one` is the reference that all others are tested against; the rest takes groups of like length
at a time, as batched products.
"""

import torch
import torch.nn.functional as F

from maxsimd.engine.execution.attention.base import PackedAttention, Prefixes
from maxsimd.engine.execution.layout import ROW_MULTIPLE, Arrangement, Group, Layout, SharedGroup
from maxsimd.pooling.transfer import to_device


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
            keys = to_device(torch.tensor(group.key_lengths), weights.device)
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
    first_blind = to_device(torch.tensor(group.key_lengths), attended.device) + (window - 1)
    blind = torch.arange(tokens, device=attended.device)[None, :] >= first_blind[:, None]
    attended.masked_fill_(blind[:, None, :, None], 0)


def attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, window: int | None
) -> torch.Tensor:
    """A chunk's queries against its own and all earlier keys."""
    tokens, keys = q.shape[1], k.shape[1]
    mask = visible(tokens, keys, True, window, q.device)
    return F.scaled_dot_product_attention(
        q[None], _repeat_heads(k, q)[None], _repeat_heads(v, q)[None], mask, scale=scale
    )[0].transpose(0, 1)


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
    "grouped",
    attend_grouped,
    attend_first_rows,
    attend_chunk,
    attend_groups_after_prefix,
    Arrangement(True, True, ROW_MULTIPLE),
    knows_float32=True,
)
