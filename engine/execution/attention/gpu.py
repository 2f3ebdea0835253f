"""Packed attention on GPUs: by our Triton kernel, or torch's variable-length attention.

Torch takes whole sequences end to end. Prefill chunks, shared prefixes and whatever else a version lacks run
by our kernel, and without Triton in plain torch."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.execution.attention.backend import AttentionMetadata, CaptureSize, GroupedBackend
from maxsimd.engine.execution.layout import Arrangement, Group, Layout, PrefillKV
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.engine.ops.triton.launch import blocks_of, is_nvidia, most_blocks
from maxsimd.pooling.ragged import to_device

_PRECISIONS = (torch.bfloat16, torch.float16)
# An empty block costs a multiprocessor about half a microsecond: 1,024 per head, with 16 heads, on 132
# multiprocessors with two at a time, take about 30.
_QUERIES_OF_A_BLOCK, _MOST_BLOCKS = 128, 1024


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
    chunk, and one for each shared prefix. `first_rows` would launch as many blocks for one query each, so it
    is not supported. Plain torch runs what the kernel does not take."""

    name = "triton"
    supports_relative = False

    def __init__(self, *, groups_shared: bool = False) -> None:
        arrangement = Arrangement(groups_whole=False, groups_shared=groups_shared, row_multiple=1)
        super().__init__(arrangement, supports_first_rows=False, supports_causal_ends=False)

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

    def prepare_for_capture(self, tried: Any, size: CaptureSize) -> "StaticBlocks | None":
        """Metadata for steps of a size; None if a graph would cost more than it saves."""
        return StaticBlocks(tried, size)


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
        return TritonMetadata(Layout(self._causal), self._device, captured=self._launch(tensors))

    def contents(self, layout: Layout) -> dict[str, NDArray[np.int32]] | None:
        """The contents of the tensors for a layout, to be followed by zeros; None for a layout that the
        captured launches do not fit."""
        table = _whole_sequences(layout)
        return {name: blocks_of(table, self._causal, 0, tile) for tile, name in self._names.items()}

    def _launch(self, tensors: Mapping[str, torch.Tensor]) -> Launch:
        blocks = {tile: tensors[name] for tile, name in self._names.items()}
        return Launch(None, self._causal, self._device, blocks)


def _kernel_takes(qkv: QKV) -> bool:
    """Whether the kernel runs on this device and takes these heads."""
    if not triton_ops.runs_on(qkv.query.device):
        return False
    from maxsimd.engine.ops.triton.attention import is_supported

    return is_supported(qkv)


def _whole_sequences(layout: Layout) -> NDArray[np.int64]:
    """The table of whole sequences."""
    return layout.whole_sequences[:, [0, 1, 0, 2]]


def is_varlen_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has variable-length attention for this device and precision."""
    if not is_nvidia(device) or dtype not in _PRECISIONS:
        return False
    try:
        return bool({"window_size", "is_causal"} & _parameters(_varlen_attn()))
    except ImportError:
        return False


@dataclass(frozen=True, eq=False)
class VarlenMetadata(TritonMetadata):
    """The first row of each whole sequence, `offsets` int32 [sequences + 1], and its visible keys,
    `key_lengths` int32 [sequences], or None if each sees all of its keys."""

    offsets: torch.Tensor
    key_lengths: torch.Tensor | None


class VarlenBackend(TritonBackend):
    """Attention by torch's kernel, which may be captured in a CUDA graph."""

    name = "varlen"
    supports_float32 = False

    def __init__(self, device: torch.device) -> None:
        # Without Triton plain torch attends to shared prefixes, in groups.
        super().__init__(groups_shared=not triton_ops.runs_on(device))

    def prepare(self, layout: Layout, device: torch.device) -> VarlenMetadata:
        offsets = to_device(_offsets(layout, len(layout.whole_sequences)), device)
        key_lengths = None if layout.attends_to_all else to_device(_key_lengths(layout), device)
        return VarlenMetadata(layout, device, offsets, key_lengths)

    def full(self, qkv: QKV, metadata: Any) -> torch.Tensor:
        options = _varlen_options(qkv, metadata)
        if options is None:
            return super().full(qkv, metadata)
        offsets, longest = metadata.offsets, metadata.layout.longest
        # [rows, heads, head_dim] each, with the numbers of a head side by side
        rows = [x.transpose(0, 1) for x in (qkv.query, qkv.key, qkv.value)]
        close = [x if x.stride(-1) == 1 else x.contiguous() for x in rows]
        out: torch.Tensor = _varlen_attn()(*close, offsets, offsets, longest, longest, **options)
        return out

    def prepare_for_capture(self, tried: Any, size: CaptureSize) -> "StaticVarlen | None":
        # The kernel is launched for the longest possible sequence, ours for the blocks of a step: ours is
        # better if sequences may be long.
        blocks = size.sequences * -(-size.longest // _QUERIES_OF_A_BLOCK)
        if blocks > _MOST_BLOCKS:
            return None
        return StaticVarlen(tried, size, "seqused_k" in _parameters(_varlen_attn()))


def _varlen_options(qkv: QKV, metadata: VarlenMetadata) -> dict[str, Any] | None:
    """The keyword arguments of torch's function; None if its version lacks something."""
    heads, _, head_dim = qkv.query.shape
    causal, parameters = metadata.layout.causal, _parameters(_varlen_attn())
    options: dict[str, Any] = {}
    if qkv.window is not None or (causal and "is_causal" not in parameters):
        reach = -1 if qkv.window is None else qkv.window - 1  # positions, or -1 for no limit
        options["window_size"] = (reach, 0 if causal else reach)
    elif causal:
        options["is_causal"] = True
    if qkv.scaling != head_dim**-0.5:
        options["scale"] = qkv.scaling
    if qkv.key.shape[0] != heads:
        options["enable_gqa"] = True
    if metadata.key_lengths is not None:
        options["seqused_k"] = metadata.key_lengths
    return options if options.keys() <= parameters else None


class StaticVarlen(StaticBlocks):
    """Metadata for torch's kernel in a CUDA graph, filled up with sequences without rows. If torch takes no
    key lengths, sequences must see all of their keys. Layers that ran by our own kernel when `tried` have
    their blocks here."""

    def __init__(self, tried: VarlenMetadata, size: CaptureSize, takes_key_lengths: bool) -> None:
        super().__init__(tried, size)
        self._size = size
        self._layout = Layout(tried.layout.causal, (Group(0, 1, size.longest, (size.longest,)),))
        self.shapes["offsets"] = (size.sequences + 1,)
        if takes_key_lengths:
            self.shapes["key lengths"] = (size.sequences,)

    def over(self, tensors: Mapping[str, torch.Tensor]) -> VarlenMetadata:
        varying, captured = (tensors["offsets"], tensors.get("key lengths")), self._launch(tensors)
        return VarlenMetadata(self._layout, self._device, *varying, captured=captured)

    def contents(self, layout: Layout) -> dict[str, NDArray[np.int32]] | None:
        takes_key_lengths = "key lengths" in self.shapes
        if layout.longest > self._size.longest or not (takes_key_lengths or layout.attends_to_all):
            return None
        found = {**(super().contents(layout) or {}), "offsets": _offsets(layout, self._size.sequences)}
        return found | {"key lengths": _key_lengths(layout)} if takes_key_lengths else found


# Those whose attention of whole sequences may be captured in a CUDA graph.
CapturableBackend = TritonBackend | VarlenBackend


def _varlen_attn() -> Callable[..., Any]:
    from torch.nn.attention import varlen

    return varlen.varlen_attn


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _offsets(layout: Layout, sequences: int) -> NDArray[np.int32]:
    """The first row of each sequence and the end of the last, int32 [sequences + 1]; missing ones are
    empty."""
    lengths = layout.whole_sequences[:, 1]
    return np.cumsum(np.pad(lengths, (1, sequences - len(lengths))), dtype=np.int32)


def _key_lengths(layout: Layout) -> NDArray[np.int32]:
    return layout.whole_sequences[:, 2].astype(np.int32)
