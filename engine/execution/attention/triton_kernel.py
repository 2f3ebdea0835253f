"""Packed attention by our Triton kernel: any precision, any mixture of lengths, prefixes and chunks. What the
kernel cannot take, and every device without Triton, is left to plain torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.execution.attention.base import CaptureSize
from maxsimd.engine.execution.attention.torch_grouped import GroupedAttention, GroupedMetadata
from maxsimd.engine.execution.layout import Arrangement, Layout, SharedGroup
from maxsimd.engine.execution.prefill_kv import PrefillKV
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.engine.ops.triton.attention_blocks import blocks_of, most_blocks
from maxsimd.pooling.ragged import to_device


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """The sequences of one launch, in `table`: first row, queries, first key and keys, int64 [n, 4].

    The blocks that the kernel takes depend on the tile size, and so on the size of heads and whether there is
    a window. They are cut and copied to the device once a step for each tile size, of which there is one
    unless layers differ."""

    table: NDArray[np.int64]
    causal: bool
    device: torch.device
    _blocks: dict[int, torch.Tensor] = field(default_factory=dict)

    def blocks_for(self, qkv: QKV, prefix_keys: int = 0) -> torch.Tensor:
        """The blocks, int32 [blocks, 5], for queries that see a prefix of
        `prefix_keys` keys before their own."""
        tile = _queries_of_a_tile(qkv)
        blocks = self._blocks.get(tile)
        if blocks is None:
            blocks = to_device(blocks_of(self.table, self.causal, prefix_keys, tile), self.device)
            self._blocks[tile] = blocks
        return blocks

    @property
    def tiles(self) -> tuple[int, ...]:
        """The numbers of queries a block that were asked for."""
        return tuple(self._blocks)


@dataclass(frozen=True, slots=True, eq=False)
class StaticLaunch:
    """The launch of a CUDA graph: `blocks` by the queries of a tile, at addresses that stay the same."""

    blocks: Mapping[int, torch.Tensor]

    def blocks_for(self, qkv: QKV) -> torch.Tensor:
        """As those of a `Launch`. Raises KeyError for a tile that no layer asked for when it was tried."""
        return self.blocks[_queries_of_a_tile(qkv)]


@dataclass(frozen=True, slots=True, eq=False)
class SharedLaunch:
    """The launch of all sequences that share one prefix; `group` is the index of the first of their
    groups."""

    group: int
    launch: Launch


@dataclass(frozen=True, eq=False)
class TritonMetadata(GroupedMetadata):
    """What each launch of the kernel takes. In a CUDA graph that of whole sequences is `captured`."""

    captured: StaticLaunch | None = field(default=None, kw_only=True)

    @cached_property
    def whole(self) -> Launch:
        """All whole sequences."""
        return Launch(_own_keys(self.layout), self.layout.causal, self.device)

    def whole_blocks(self, qkv: QKV) -> torch.Tensor:
        """The blocks of all whole sequences, int32 [blocks, 5]."""
        launch = self.whole if self.captured is None else self.captured
        return launch.blocks_for(qkv)

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
            if metadata.captured is not None:
                raise NotImplementedError("plain attention cannot be replayed for other sequences")
            return super().full(qkv, metadata)
        from maxsimd.engine.ops.triton.attention import attention

        out = qkv.new_output()
        attention(qkv, metadata.whole_blocks(qkv), metadata.layout.causal, out)
        return out

    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: T, out: torch.Tensor) -> None:
        if not _takes(qkv):
            super().with_prefill_kv(qkv, contexts, metadata, out)
            return
        from maxsimd.engine.ops.triton.attention import attention

        chunks = zip(metadata.layout.prefill_chunks, metadata.prefill_chunks, contexts, strict=True)
        for chunk, launch, context in chunks:
            of_chunk = QKV(qkv.query[:, chunk.rows], *context, qkv.scaling, qkv.window)
            attention(of_chunk, launch.blocks_for(of_chunk), True, out[chunk.rows])

    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: T, out: torch.Tensor) -> None:
        if not _takes(qkv):
            super().shared_prefix(qkv, prefixes, metadata, out)
            return
        from maxsimd.engine.ops.triton.attention import attention

        for shared in metadata.shared:
            prefix = prefixes[shared.group]
            blocks = shared.launch.blocks_for(qkv, prefix.key.shape[1])
            attention(qkv, blocks, True, out, prefix)


class TritonBackend(TritonAttention[TritonMetadata]):
    """Attention by our kernel, with rows end to end.

    It has no `first_rows` of its own: one query a sequence would mean one block a sequence and head, which is
    no less work for the device."""

    name = "triton"
    arrangement = Arrangement(groups_whole=False, groups_shared=False, row_multiple=1)

    def prepare(self, layout: Layout, device: torch.device) -> TritonMetadata:
        return TritonMetadata(layout, device)

    def prepare_for_capture(self, tried: TritonMetadata, size: CaptureSize) -> "StaticBlocks":
        return StaticBlocks(tried, size)


class StaticBlocks:
    """The blocks of a CUDA graph, for each tile size that was `tried`.

    The kernel is launched for as many blocks as sequences of a graph's size can be cut into. Those that a
    step does not have are empty, and end at once."""

    def __init__(self, tried: TritonMetadata, size: CaptureSize) -> None:
        self._causal = tried.layout.causal
        self._device = tried.device
        self._names = {tile: f"blocks of {tile}" for tile in tried.whole.tiles}
        self.shapes = {
            name: (most_blocks(size.rows, size.sequences, tile), 5) for tile, name in self._names.items()
        }

    def launch(self, tensors: Mapping[str, torch.Tensor]) -> StaticLaunch:
        """The launch that reads its blocks from these tensors."""
        return StaticLaunch({tile: tensors[name] for tile, name in self._names.items()})

    def over(self, tensors: Mapping[str, torch.Tensor]) -> TritonMetadata:
        return TritonMetadata(Layout(self._causal), self._device, captured=self.launch(tensors))

    def contents(self, layout: Layout) -> dict[str, NDArray[np.int32]]:
        table = _own_keys(layout)
        return {name: blocks_of(table, self._causal, 0, tile) for tile, name in self._names.items()}


def _takes(qkv: QKV) -> bool:
    """Whether the kernel runs on this device and takes heads like these."""
    if not triton_ops.runs_on(qkv.query.device):
        return False
    from maxsimd.engine.ops.triton.attention import is_supported

    return is_supported(qkv)


def _queries_of_a_tile(qkv: QKV) -> int:
    from maxsimd.engine.ops.triton.attention import tiles_of

    return tiles_of(qkv).queries


def _own_keys(layout: Layout) -> NDArray[np.int64]:
    """The table of whole sequences, whose first keys are their own."""
    return layout.whole_sequences[:, [0, 1, 0, 2]]


def _own(group: SharedGroup) -> Iterable[tuple[int, int, int, int]]:
    """The sequences of a group with their own keys."""
    starts = range(group.rows.start, group.rows.stop, group.length)
    return ((start, group.length, start, group.length) for start in starts)


def _table(sequences: Iterable[tuple[int, int, int, int]]) -> NDArray[np.int64]:
    return np.array(list(sequences), dtype=np.int64)
