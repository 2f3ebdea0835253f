"""Packed attention on GPUs by our Triton kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.execution.attention.backend import AttentionMetadata, CaptureSize, GroupedBackend
from maxsimd.engine.execution.layout import Arrangement, Layout, PrefillKV
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.engine.ops.triton.launch import blocks_of, most_blocks
from maxsimd.pooling.ragged import to_device


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """The sequences of one launch, in `table`: first row, queries, first key and keys, int64 [n, 4].

    Their `blocks` depend on the tile size, and so on the size of heads and the window. They are copied to the
    device once per step for each tile size: one, unless layers differ. In a CUDA graph they are at fixed
    addresses, and there is no table."""

    table: NDArray[np.int64] | None
    causal: bool
    device: torch.device
    blocks: dict[int, torch.Tensor] = field(default_factory=dict)

    def blocks_for(self, qkv: QKV, prefix_keys: int = 0) -> torch.Tensor:
        """The blocks, int32 [blocks, 5], for queries that see `prefix_keys` keys before their own."""
        from maxsimd.engine.ops.triton.attention import tiles_of

        tile = tiles_of(qkv).queries
        if tile not in self.blocks:
            if self.table is None:
                raise KeyError(f"no layer asked for blocks of {tile} queries when the graph was tried")
            blocks = blocks_of(self.table, self.causal, prefix_keys, tile)
            self.blocks[tile] = to_device(blocks, self.device)
        return self.blocks[tile]


@dataclass(frozen=True, eq=False)
class TritonMetadata(AttentionMetadata):
    """The launches of the kernel. In a CUDA graph that of whole sequences is `captured`."""

    captured: Launch | None = field(default=None, kw_only=True)

    @cached_property
    def whole(self) -> Launch:
        return Launch(_whole_sequences(self.layout), self.layout.causal, self.device)

    def whole_blocks(self, qkv: QKV) -> torch.Tensor:
        return (self.captured or self.whole).blocks_for(qkv)

    @cached_property
    def prefill_chunks(self) -> tuple[Launch, ...]:
        """A launch for each prefill chunk, whose rows and context begin at row and key 0."""
        return tuple(
            Launch(np.array([(0, chunk.num_tokens, 0, chunk.stop)]), True, self.device)
            for chunk in self.layout.prefill_chunks
        )

    @cached_property
    def shared(self) -> tuple[tuple[int, Launch], ...]:
        """A launch for all sequences with the same prefix, and the index of their first group."""
        found: dict[PrefillKV, tuple[int, list[tuple[int, int, int, int]]]] = {}
        for index, group in enumerate(self.layout.shared_groups):
            _, table = found.setdefault(group.prefix, (index, []))
            starts = range(group.rows.start, group.rows.stop, group.length)
            table += [(start, group.length, start, group.length) for start in starts]
        return tuple((index, Launch(np.array(table), True, self.device)) for index, table in found.values())


class TritonBackend(GroupedBackend):
    """Attention by our kernel, with rows end to end: a launch over all whole sequences, one for each prefill
    chunk, and one for each shared prefix. Where first rows alone count, it computes all: blocks of one query
    would be as many. Plain torch runs what the kernel does not take."""

    name = "triton"
    supports_relative = False
    arrangement = Arrangement(groups_whole=False, groups_shared=False, row_multiple=1)

    def __init__(self) -> None:
        super().__init__(self.arrangement, supports_causal_ends=False)

    def prepare(self, layout: Layout, device: torch.device) -> TritonMetadata:
        return TritonMetadata(layout, device)

    def full(self, qkv: QKV, metadata: Any) -> torch.Tensor:
        if not _kernel_takes(qkv):
            if metadata.captured is not None:
                raise NotImplementedError("plain attention cannot be replayed for other sequences")
            return super().full(qkv, metadata)
        from maxsimd.engine.ops.triton.attention import attention

        out = qkv.new_output()
        attention(qkv, metadata.whole_blocks(qkv), metadata.layout.causal, out)
        return out

    def first_rows(self, qkv: QKV, metadata: Any) -> torch.Tensor:
        return self.full(qkv, metadata)

    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: Any, out: torch.Tensor) -> None:
        if not _kernel_takes(qkv):
            super().with_prefill_kv(qkv, contexts, metadata, out)
            return
        from maxsimd.engine.ops.triton.attention import attention

        chunks = zip(metadata.layout.prefill_chunks, metadata.prefill_chunks, contexts, strict=True)
        for chunk, launch, context in chunks:
            of_chunk = QKV(qkv.query[:, chunk.rows], *context, qkv.scaling, qkv.window)
            attention(of_chunk, launch.blocks_for(of_chunk), True, out[chunk.rows])

    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: Any, out: torch.Tensor) -> None:
        if not _kernel_takes(qkv):
            super().shared_prefix(qkv, prefixes, metadata, out)
            return
        from maxsimd.engine.ops.triton.attention import attention

        for index, launch in metadata.shared:
            prefix = prefixes[index]
            blocks = launch.blocks_for(qkv, prefix.key.shape[1])
            attention(qkv, blocks, True, out, prefix)


class StaticBlocks:
    """Metadata for a CUDA graph: its tensors, int32 of these `shapes`, stay at one address while their
    contents change. They are the blocks for each tile size that was `tried`, with which the model has run:
    the most that a step of this size can have. Those that a step lacks are empty and end at once."""

    def __init__(self, tried: TritonMetadata, size: CaptureSize) -> None:
        self._causal = tried.layout.causal
        self._device = tried.device
        self._names = {tile: f"blocks of {tile}" for tile in tried.whole.blocks}
        self.shapes: dict[str, tuple[int, ...]] = {
            name: (most_blocks(size.rows, size.sequences, tile), 5) for tile, name in self._names.items()
        }

    def over(self, tensors: Mapping[str, torch.Tensor]) -> TritonMetadata:
        """The metadata that the captured launches read from these tensors."""
        blocks = {tile: tensors[name] for tile, name in self._names.items()}
        captured = Launch(None, self._causal, self._device, blocks)
        return TritonMetadata(Layout(self._causal), self._device, captured=captured)

    def contents(self, layout: Layout) -> dict[str, NDArray[np.int32]]:
        """The contents of the tensors for a layout, to be followed by zeros."""
        table = _whole_sequences(layout)
        return {name: blocks_of(table, self._causal, 0, tile) for tile, name in self._names.items()}


def _kernel_takes(qkv: QKV) -> bool:
    """Whether the kernel runs on this device and takes these heads."""
    if not triton_ops.runs_on(qkv.query.device):
        return False
    from maxsimd.engine.ops.triton.attention import is_supported

    return is_supported(qkv)


def _whole_sequences(layout: Layout) -> NDArray[np.int64]:
    """The table of whole sequences."""
    return layout.whole_sequences[:, [0, 1, 0, 2]]
