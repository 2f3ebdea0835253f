"""Packed attention by our Triton kernel: any precision, any mixture of lengths, prefixes and chunks. What the
kernel cannot take, and every device without Triton, is left to plain torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.execution.attention.torch_grouped import GroupedAttention, GroupedMetadata
from maxsimd.engine.execution.layout import Arrangement, Layout, SharedGroup
from maxsimd.engine.execution.prefill_kv import PrefillKV
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.pooling.transfer import to_device


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """The sequences of one launch, in `table`: first row, queries, first key and keys, int64 [n, 4].

    The blocks that the kernel takes depend on the tile size, and so on the size of heads. They are cut and
    copied to the device once a step for each tile size, of which there is one unless layers differ."""

    table: NDArray[np.int64]
    causal: bool
    device: torch.device
    _blocks: dict[int, torch.Tensor] = field(default_factory=dict)

    def blocks_for(self, query: torch.Tensor, prefix_keys: int = 0) -> torch.Tensor:
        """The blocks, int32 [blocks, 5], for queries [heads, rows, head_dim] that see a prefix of
        `prefix_keys` keys before their own."""
        from maxsimd.engine.ops.triton.attention import blocks_of, tiles_for

        tile = tiles_for(query.device, query.shape[-1], query.itemsize).queries
        blocks = self._blocks.get(tile)
        if blocks is None:
            blocks = to_device(blocks_of(self.table, self.causal, prefix_keys, tile), self.device)
            self._blocks[tile] = blocks
        return blocks


@dataclass(frozen=True, slots=True, eq=False)
class SharedLaunch:
    """The launch of all sequences that share one prefix; `group` is the index of the first of their
    groups."""

    group: int
    launch: Launch


class TritonMetadata(GroupedMetadata):
    """What each launch of the kernel takes."""

    @cached_property
    def whole(self) -> Launch:
        """All whole sequences."""
        table = (
            (group.first_row + i * group.length, group.length, group.first_row + i * group.length, keys)
            for group in self.layout.groups
            for i, keys in enumerate(group.key_lengths)
        )
        return Launch(_table(table), self.layout.causal, self.device)

    @cached_property
    def prefill_chunks(self) -> tuple[Launch, ...]:
        """A launch for each prefill chunk, whose rows and context are handed to it as row and key 0
        onwards."""
        return tuple(
            Launch(_table([(0, chunk.num_tokens, 0, chunk.stop)]), True, self.device)
            for chunk in self.layout.prefill_chunks
        )

    @cached_property
    def shared(self) -> tuple[SharedLaunch, ...]:
        """A launch for each shared prefix."""
        by_prefix: dict[PrefillKV, list[tuple[int, SharedGroup]]] = {}
        for index, group in enumerate(self.layout.shared_groups):
            by_prefix.setdefault(group.prefix, []).append((index, group))
        return tuple(
            SharedLaunch(
                groups[0][0],
                Launch(_table(row for _, group in groups for row in _own(group)), True, self.device),
            )
            for groups in by_prefix.values()
        )


T = TypeVar("T", bound=TritonMetadata)


class TritonAttention(GroupedAttention[T]):
    """One launch over all whole sequences, one a prefill chunk, and one a shared prefix."""

    def full(self, qkv: QKV, metadata: T) -> torch.Tensor:
        if not _takes(qkv):
            return super().full(qkv, metadata)
        from maxsimd.engine.ops.triton.attention import attention

        out = qkv.new_output()
        attention(qkv, metadata.whole.blocks_for(qkv.query), metadata.layout.causal, out)
        return out

    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: T, out: torch.Tensor) -> None:
        if not _takes(qkv):
            super().with_prefill_kv(qkv, contexts, metadata, out)
            return
        from maxsimd.engine.ops.triton.attention import attention

        chunks = zip(metadata.layout.prefill_chunks, metadata.prefill_chunks, contexts, strict=True)
        for chunk, launch, context in chunks:
            of_chunk = QKV(qkv.query[:, chunk.rows], *context, qkv.scaling, qkv.window)
            attention(of_chunk, launch.blocks_for(qkv.query), True, out[chunk.rows])

    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: T, out: torch.Tensor) -> None:
        if not _takes(qkv):
            super().shared_prefix(qkv, prefixes, metadata, out)
            return
        from maxsimd.engine.ops.triton.attention import attention

        for shared in metadata.shared:
            prefix = prefixes[shared.group]
            blocks = shared.launch.blocks_for(qkv.query, prefix.key.shape[1])
            attention(qkv, blocks, True, out, prefix)


class TritonBackend(TritonAttention[TritonMetadata]):
    """Attention by our kernel, with rows end to end.

    It has no `first_rows` of its own: one query a sequence would mean one block a sequence and head, which is
    no less work for the device."""

    name = "triton"
    arrangement = Arrangement(groups_whole=False, groups_shared=False, row_multiple=1)

    def prepare(self, layout: Layout, device: torch.device) -> TritonMetadata:
        return TritonMetadata(layout, device)


def _takes(qkv: QKV) -> bool:
    """Whether the kernel runs on this device and takes heads of this size."""
    if not triton_ops.runs_on(qkv.query.device):
        return False
    from maxsimd.engine.ops.triton.attention import is_supported

    return is_supported(qkv)


def _own(group: SharedGroup) -> Iterable[tuple[int, int, int, int]]:
    """The sequences of a group with their own keys."""
    starts = range(group.rows.start, group.rows.stop, group.length)
    return ((start, group.length, start, group.length) for start in starts)


def _table(sequences: Iterable[tuple[int, int, int, int]]) -> NDArray[np.int64]:
    return np.array(list(sequences), dtype=np.int64)
