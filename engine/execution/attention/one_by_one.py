"""The plain reference that all other backends are tested against: torch's own attention, one sequence at a
time."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from maxsimd.engine.execution.attention.base import AttentionBackend, AttentionMetadata, M
from maxsimd.engine.execution.layout import Arrangement, Layout
from maxsimd.engine.ops.qkv import KV, QKV


class OneByOneAttention(AttentionBackend[M]):
    """`scaled_dot_product_attention` for each sequence alone, whatever the metadata of the backend."""

    def full(self, qkv: QKV, metadata: M) -> torch.Tensor:
        out = torch.zeros_like(qkv.new_output())
        layout = metadata.layout
        for group in layout.groups:
            for i, keys in enumerate(group.key_lengths):
                start = group.first_row + i * group.length
                rows = slice(start, start + group.length)
                kv = KV(qkv.key[:, start : start + keys], qkv.value[:, start : start + keys])
                out[rows] = attend_one(qkv, rows, kv, layout.causal)
        return out

    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: M, out: torch.Tensor) -> None:
        for chunk, context in zip(metadata.layout.prefill_chunks, contexts, strict=True):
            out[chunk.rows] = attend_one(qkv, chunk.rows, context, causal=True)

    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: M, out: torch.Tensor) -> None:
        for group, prefix in zip(metadata.layout.shared_groups, prefixes, strict=True):
            for start in range(group.rows.start, group.rows.stop, group.length):
                rows = slice(start, start + group.length)
                kv = KV(
                    torch.cat([prefix.key, qkv.key[:, rows]], dim=1),
                    torch.cat([prefix.value, qkv.value[:, rows]], dim=1),
                )
                out[rows] = attend_one(qkv, rows, kv, causal=True)


class OneByOneBackend(OneByOneAttention[AttentionMetadata]):
    """The reference with rows end to end."""

    name = "one by one"
    supports_relative = True
    supports_causal_ends = True
    arrangement = Arrangement(groups_whole=False, groups_shared=False, row_multiple=1)

    def prepare(self, layout: Layout, device: torch.device) -> AttentionMetadata:
        return AttentionMetadata(layout, device)


def attend_one(qkv: QKV, rows: slice, kv: KV, causal: bool) -> torch.Tensor:
    """The queries in `rows` against the keys and values of their sequence: [rows, heads, head_dim]."""
    query = qkv.query[:, rows]
    mask = visible(query.shape[1], kv.key.shape[1], causal, qkv.window, query.device)
    if qkv.relative is not None:
        before = kv.key.shape[1] - query.shape[1] if causal else 0
        terms = qkv.relative.terms(query, kv.key, qkv.scaling, before).to(query.dtype)
        mask = terms if mask is None else terms.masked_fill(~mask, float("-inf"))
        mask = mask[None]
    key, value = repeat_heads(kv.key, query), repeat_heads(kv.value, query)
    attended = F.scaled_dot_product_attention(query[None], key[None], value[None], mask, scale=qkv.scaling)
    return attended[0].transpose(0, 1)


def visible(
    tokens: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Which keys each token sees, as bool [tokens, keys], or None if each sees all of them.

    Causal tokens are the last of the keys' sequence, or begin with it if they are more than the keys. A
    window means what it means in transformers' masks."""
    row = torch.arange(tokens, device=device)[:, None]
    column = torch.arange(keys, device=device)[None, :]
    if causal:
        row = row + max(0, keys - tokens)
        seen = column <= row
        return seen if window is None else seen & (column > row - window)
    # ModernBERT hands its layers the half-window plus one; its mask sees distances up to the half-window.
    return None if window is None else (row - column).abs() < window


def repeat_heads(kv: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values [..., kv_heads, tokens, head_dim] repeated for grouped-query attention."""
    repeats = query.shape[-3] // kv.shape[-3]
    return kv if repeats == 1 else kv.repeat_interleave(repeats, dim=-3)
