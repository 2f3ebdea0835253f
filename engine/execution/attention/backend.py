"""The interface of attention backends, and attention in plain torch: one by one, the reference of all others,
and in batched products."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from maxsimd.engine.execution.layout import Arrangement, Group, Layout, RowGroup
from maxsimd.engine.ops.cpu.library import multiplies_bfloat16
from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.pooling.ragged import to_device


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """A step as a backend needs it, besides queries, keys and values. Made once, read by every layer."""

    layout: Layout
    device: torch.device

    @cached_property
    def first_of_each(self) -> torch.Tensor:
        """The first row of each whole sequence, int64 [sequences]."""
        return to_device(torch.from_numpy(self.layout.whole_sequences[:, 0].copy()), self.device)

    @cached_property
    def hidden_keys(self) -> dict[Group, torch.Tensor]:
        """The padding and masked keys of each group that has any: bool [count, 1, 1, columns], over the
        columns from the end of its shortest sequence on."""
        hidden = {}
        for group in self.layout.groups:
            shortest = min(group.key_lengths)
            if shortest < group.length:
                keys = to_device(torch.tensor(group.key_lengths), self.device)
                columns = torch.arange(shortest, group.length, device=self.device)
                hidden[group] = (columns[None, :] >= keys[:, None])[:, None, None, :]
        return hidden


class AttentionBackend(ABC):
    """One way to attend within the sequences of a step, with the metadata that its `prepare` makes.

    `supports_relative` says whether relative positions are added, and `supports_causal_ends` whether causal
    sequences may end in masked tokens."""

    name: str
    arrangement: Arrangement
    supports_relative: bool = False
    supports_causal_ends: bool = False

    @abstractmethod
    def prepare(self, layout: Layout, device: torch.device) -> AttentionMetadata:
        """The metadata of a step."""

    @abstractmethod
    def full(self, qkv: QKV, metadata: Any) -> torch.Tensor:
        """Attention within each whole sequence: [rows, heads, head_dim]. The rows of `qkv` after those of
        `layout.groups` are padding, whose result has no meaning."""

    def first_rows(self, qkv: QKV, metadata: Any) -> torch.Tensor:
        """Computes what `full` does, but only the result for the first row of each sequence counts."""
        return self.full(qkv, metadata)

    @abstractmethod
    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: Any, out: torch.Tensor) -> None:
        """Attention of each of `layout.prefill_chunks` to its context: all keys and values of its sequence up
        to and including the chunk. Writes these rows of `out` [rows, heads, head_dim]."""

    @abstractmethod
    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: Any, out: torch.Tensor) -> None:
        """Attention of each sequence in `layout.shared_groups` to its group's prefix and then to itself.
        `prefixes` has one entry per group. Writes these rows of `out` [rows, heads, head_dim]."""


@dataclass(frozen=True, slots=True, order=True)
class CaptureSize:
    """The steps of a CUDA graph: up to `rows` rows and `sequences` whole sequences of up to `longest`
    rows."""

    rows: int
    sequences: int
    longest: int

    def __str__(self) -> str:
        return f"{self.rows} rows and {self.sequences} sequences"


class OneByOneBackend(AttentionBackend):
    """torch's own attention, one sequence at a time, with rows end to end: the reference."""

    name = "one by one"
    supports_relative = True
    supports_causal_ends = True
    arrangement = Arrangement(groups_whole=False, groups_shared=False, row_multiple=1)

    def prepare(self, layout: Layout, device: torch.device) -> AttentionMetadata:
        return AttentionMetadata(layout, device)

    def full(self, qkv: QKV, metadata: AttentionMetadata) -> torch.Tensor:
        out = torch.zeros_like(qkv.new_output())
        layout = metadata.layout
        for group in layout.groups:
            for i, keys in enumerate(group.key_lengths):
                start = group.first_row + i * group.length
                rows = slice(start, start + group.length)
                kv = KV(qkv.key[:, start : start + keys], qkv.value[:, start : start + keys])
                out[rows] = attend_one(qkv, rows, kv, layout.causal)
        return out

    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: Any, out: torch.Tensor) -> None:
        for chunk, context in zip(metadata.layout.prefill_chunks, contexts, strict=True):
            out[chunk.rows] = attend_one(qkv, chunk.rows, context, causal=True)

    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: Any, out: torch.Tensor) -> None:
        for group, prefix in zip(metadata.layout.shared_groups, prefixes, strict=True):
            for start in range(group.rows.start, group.rows.stop, group.length):
                rows = slice(start, start + group.length)
                own = qkv.of_rows(rows)
                key = torch.cat([prefix.key, own.key], dim=1)
                value = torch.cat([prefix.value, own.value], dim=1)
                out[rows] = attend_one(qkv, rows, KV(key, value), causal=True)


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
    """The keys that each token sees, bool [tokens, keys], or None for all. Causal tokens are the last of the
    keys' sequence, or begin with it if they outnumber the keys. Windows are those of transformers' masks."""
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


# Matrix libraries compile a kernel for each new shape, which takes time and memory. So the number of rows of
# a step is a multiple of this, and lengths within it are rounded (`round_length`).
ROW_MULTIPLE = 32
GROUPED_ROWS = Arrangement(groups_whole=True, groups_shared=True, row_multiple=ROW_MULTIPLE)


class GroupedBackend(OneByOneBackend):
    """Attention in plain torch, by batched products for each group of similar sequences. Its arrangement and
    support are options, so that it can stand in for another backend in the self-check."""

    name = "grouped"

    def __init__(self, arrangement: Arrangement = GROUPED_ROWS, *, supports_causal_ends: bool = True) -> None:
        self.arrangement = arrangement
        self.supports_causal_ends = supports_causal_ends

    def full(self, qkv: QKV, metadata: AttentionMetadata) -> torch.Tensor:
        out = qkv.new_output()
        qkv = _for_products(qkv)
        layout = metadata.layout
        attend = _causal if layout.causal else _bidirectional
        for group in layout.groups:
            attended = attend(_batched(qkv, group), group, metadata)
            _rows_of(out, group).copy_(attended.transpose(1, 2))
        out[layout.groups[-1].rows.stop :] = 0
        return out

    def first_rows(self, qkv: QKV, metadata: AttentionMetadata) -> torch.Tensor:
        out = qkv.new_output()
        qkv = _for_products(qkv)
        for group in metadata.layout.groups:
            whole = _batched(qkv, group)
            first = replace(whole, query=whole.query[:, :, :1])
            _rows_of(out, group)[:, 0] = _bidirectional(first, group, metadata)[:, :, 0]
        return out

    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: Any, out: torch.Tensor) -> None:
        super().with_prefill_kv(_for_products(qkv), [_kv_for_products(kv) for kv in contexts], metadata, out)

    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: Any, out: torch.Tensor) -> None:
        qkv = _for_products(qkv)
        for group, prefix in zip(metadata.layout.shared_groups, prefixes, strict=True):
            attended = _attend_behind_prefix(_batched(qkv, group), _kv_for_products(prefix))
            _rows_of(out, group).copy_(attended.transpose(1, 2))


def _for_products(qkv: QKV) -> QKV:
    query, key, value = map(_float32_on_slow_cpu, (qkv.query, qkv.key, qkv.value))
    return replace(qkv, query=query, key=key, value=value)


def _kv_for_products(kv: KV) -> KV:
    return KV(*map(_float32_on_slow_cpu, kv))


def _float32_on_slow_cpu(x: torch.Tensor) -> torch.Tensor:
    """16-bit numbers as float32 on a CPU that does not multiply them natively: torch is many times slower."""
    native = x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and multiplies_bfloat16())
    return x if x.device.type != "cpu" or native else x.float()


def _rows_of(out: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """A group's part of [rows, heads, head_dim], as a view [n, length, heads, head_dim]."""
    part: torch.Tensor = out[group.rows].unflatten(0, (group.count, group.length))
    return part


def _batched(qkv: QKV, group: RowGroup) -> QKV:
    """A group's queries, keys and values, as views [n, heads, length, head_dim]."""
    query, key, value = (
        x[:, group.rows].unflatten(1, (group.count, group.length)).transpose(0, 1)
        for x in (qkv.query, qkv.key, qkv.value)
    )
    return replace(qkv, query=query, key=key, value=value)


def _bidirectional(qkv: QKV, group: Group, metadata: AttentionMetadata) -> torch.Tensor:
    """All or the first queries [n, heads, tokens, head_dim] of a group against its keys and values."""
    n, heads, tokens, head_dim = qkv.query.shape
    key, value = repeat_heads(qkv.key, qkv.query), repeat_heads(qkv.value, qkv.query)
    # One product over all sequences and heads, with the scaling in it.
    weights = torch.baddbmm(
        qkv.query.new_empty(n * heads, tokens, group.length),
        qkv.query.reshape(n * heads, tokens, head_dim),
        key.reshape(n * heads, group.length, head_dim).transpose(1, 2),
        beta=0,
        alpha=qkv.scaling,
    ).unflatten(0, (n, heads))  # [n, heads, tokens, keys]
    if qkv.relative is not None:  # in float32: far keys may lose more than products differ by
        weights = weights.float() + qkv.relative.terms(qkv.query, key, qkv.scaling)
    values = value.reshape(n * heads, group.length, value.shape[-1])
    low = torch.finfo(weights.dtype).min
    hidden = metadata.hidden_keys.get(group)
    if hidden is not None:
        weights[..., -hidden.shape[-1] :].masked_fill_(hidden, low)
    if qkv.window is not None and qkv.window < group.length:
        seen = visible(tokens, group.length, False, qkv.window, weights.device)
        assert seen is not None
        weights.masked_fill_(~seen, low)
    softmax = torch.softmax(weights, dim=-1).to(values.dtype)
    attended: torch.Tensor = torch.bmm(softmax.flatten(0, 1), values)
    attended = attended.view(n, heads, tokens, -1)
    _clear_blind_rows(attended, group, qkv.window)
    return attended


def _causal(qkv: QKV, group: Group, metadata: AttentionMetadata) -> torch.Tensor:
    """Causal attention of each sequence of a group. The padding comes last, so no token sees it."""
    _refuse_relative(qkv)
    length = qkv.query.shape[2]
    gqa = qkv.key.shape[1] != qkv.query.shape[1]
    hidden = metadata.hidden_keys.get(group) if metadata.layout.hides_ends else None
    windowed = qkv.window is not None and qkv.window < length
    masked = windowed or hidden is not None
    mask = visible(length, length, True, qkv.window, qkv.query.device) if masked else None
    if hidden is not None:
        assert mask is not None
        shown = F.pad(~hidden, (length - hidden.shape[-1], 0), value=True)  # [n, 1, 1, length]
        mask = mask & shown
    attended = F.scaled_dot_product_attention(
        qkv.query, qkv.key, qkv.value, mask, is_causal=not masked, scale=qkv.scaling, enable_gqa=gqa
    )
    if hidden is not None:
        _clear_blind_rows(attended, group, qkv.window)
    return attended


def _attend_behind_prefix(qkv: QKV, prefix: KV) -> torch.Tensor:
    """Queries [n, heads, tokens, head_dim] against one prefix [kv_heads, before, head_dim] and then each
    sequence against itself."""
    _refuse_relative(qkv)
    n, _, tokens, _ = qkv.query.shape
    key = torch.cat([prefix.key.expand(n, -1, -1, -1), qkv.key], dim=2)
    value = torch.cat([prefix.value.expand(n, -1, -1, -1), qkv.value], dim=2)
    mask = visible(tokens, key.shape[2], True, qkv.window, qkv.query.device)
    gqa = qkv.key.shape[1] != qkv.query.shape[1]
    return F.scaled_dot_product_attention(qkv.query, key, value, mask, scale=qkv.scaling, enable_gqa=gqa)


def _refuse_relative(qkv: QKV) -> None:
    if qkv.relative is not None:
        raise NotImplementedError("no causal model with relative positions is run by groups")


def _clear_blind_rows(attended: torch.Tensor, group: Group, window: int | None) -> None:
    """Zeroes the rows of [n, heads, tokens, head_dim] whose window holds no visible key, such as tokens that
    expand a query far behind its attended ones."""
    tokens = attended.shape[2]
    if window is None or min(group.key_lengths) + window > tokens:
        return
    first_blind = to_device(torch.tensor(group.key_lengths), attended.device) + (window - 1)
    blind = torch.arange(tokens, device=attended.device)[None, :] >= first_blind[:, None]
    attended.masked_fill_(blind[:, None, :, None], 0)
