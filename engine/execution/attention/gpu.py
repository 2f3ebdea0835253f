"""Packed attention on GPUs: by our Triton kernel, torch's variable-length attention, or flash-attn.

The libraries take whole sequences end to end. Prefill chunks, shared prefixes and whatever else a version
lacks run by our kernel, and without Triton in plain torch."""

import functools
import importlib
import importlib.util
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.execution.attention.backend import CaptureSize, GroupedAttention, GroupedMetadata
from maxsimd.engine.execution.layout import Arrangement, Group, Layout, PrefillKV, SharedGroup
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

    Their blocks depend on the tile size, and so on the size of heads and the window. They are copied to the
    device once per step for each tile size: one, unless layers differ."""

    table: NDArray[np.int64]
    causal: bool
    device: torch.device
    _blocks: dict[int, torch.Tensor] = field(default_factory=dict)

    def blocks_for(self, qkv: QKV, prefix_keys: int = 0) -> torch.Tensor:
        """The blocks, int32 [blocks, 5], for queries that see `prefix_keys` keys before their own."""
        tile = _queries_of_a_tile(qkv)
        blocks = self._blocks.get(tile)
        if blocks is None:
            blocks = to_device(blocks_of(self.table, self.causal, prefix_keys, tile), self.device)
            self._blocks[tile] = blocks
        return blocks

    @property
    def tiles(self) -> tuple[int, ...]:
        return tuple(self._blocks)


@dataclass(frozen=True, slots=True, eq=False)
class StaticLaunch:
    """The launch of a CUDA graph: `blocks` by tile size, at fixed addresses."""

    blocks: Mapping[int, torch.Tensor]

    def blocks_for(self, qkv: QKV) -> torch.Tensor:
        """Raises KeyError for a tile size that no layer asked for when it was tried."""
        return self.blocks[_queries_of_a_tile(qkv)]


@dataclass(frozen=True, eq=False)
class TritonMetadata(GroupedMetadata):
    """The launches of the kernel. In a CUDA graph that of whole sequences is `captured`."""

    captured: StaticLaunch | None = field(default=None, kw_only=True)

    @cached_property
    def whole(self) -> Launch:
        return Launch(_whole_sequences(self.layout), self.layout.causal, self.device)

    def whole_blocks(self, qkv: QKV) -> torch.Tensor:
        launch = self.whole if self.captured is None else self.captured
        return launch.blocks_for(qkv)

    @cached_property
    def prefill_chunks(self) -> tuple[Launch, ...]:
        """A launch for each prefill chunk, whose rows and context begin at row and key 0."""
        return tuple(
            Launch(_table([(0, chunk.num_tokens, 0, chunk.stop)]), True, self.device)
            for chunk in self.layout.prefill_chunks
        )

    @cached_property
    def shared(self) -> tuple[tuple[int, Launch], ...]:
        """A launch for all sequences with the same prefix, and the index of their first group."""
        by_prefix: dict[PrefillKV, list[tuple[int, SharedGroup]]] = {}
        for index, group in enumerate(self.layout.shared_groups):
            by_prefix.setdefault(group.prefix, []).append((index, group))
        return tuple(
            (
                groups[0][0],
                Launch(_table(row for _, group in groups for row in _sequences_of(group)), True, self.device),
            )
            for groups in by_prefix.values()
        )


T = TypeVar("T", bound=TritonMetadata)


class TritonAttention(GroupedAttention[T]):
    """One launch over all whole sequences, one a prefill chunk, and one a shared prefix."""

    def full(self, qkv: QKV, metadata: T) -> torch.Tensor:
        if not _kernel_takes(qkv):
            if metadata.captured is not None:
                raise NotImplementedError("plain attention cannot be replayed for other sequences")
            return super().full(qkv, metadata)
        from maxsimd.engine.ops.triton.attention import attention

        out = qkv.new_output()
        attention(qkv, metadata.whole_blocks(qkv), metadata.layout.causal, out)
        return out

    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: T, out: torch.Tensor) -> None:
        if not _kernel_takes(qkv):
            super().with_prefill_kv(qkv, contexts, metadata, out)
            return
        from maxsimd.engine.ops.triton.attention import attention

        chunks = zip(metadata.layout.prefill_chunks, metadata.prefill_chunks, contexts, strict=True)
        for chunk, launch, context in chunks:
            of_chunk = QKV(qkv.query[:, chunk.rows], *context, qkv.scaling, qkv.window)
            attention(of_chunk, launch.blocks_for(of_chunk), True, out[chunk.rows])

    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: T, out: torch.Tensor) -> None:
        if not _kernel_takes(qkv):
            super().shared_prefix(qkv, prefixes, metadata, out)
            return
        from maxsimd.engine.ops.triton.attention import attention

        for index, launch in metadata.shared:
            prefix = prefixes[index]
            blocks = launch.blocks_for(qkv, prefix.key.shape[1])
            attention(qkv, blocks, True, out, prefix)


class TritonBackend(TritonAttention[TritonMetadata]):
    """Attention by our kernel, with rows end to end. `first_rows` would launch as many blocks for one query
    each, so it is not supported."""

    name = "triton"
    arrangement = Arrangement(groups_whole=False, groups_shared=False, row_multiple=1)

    def prepare(self, layout: Layout, device: torch.device) -> TritonMetadata:
        return TritonMetadata(layout, device)

    def prepare_for_capture(self, tried: TritonMetadata, size: CaptureSize) -> "StaticBlocks":
        return StaticBlocks(tried, size)


class StaticBlocks:
    """The blocks of a CUDA graph, for each tile size that was `tried`: the most that a step of its size can
    have. Those that a step lacks are empty and end at once."""

    def __init__(self, tried: TritonMetadata, size: CaptureSize) -> None:
        self._causal = tried.layout.causal
        self._device = tried.device
        self._names = {tile: f"blocks of {tile}" for tile in tried.whole.tiles}
        self.shapes = {
            name: (most_blocks(size.rows, size.sequences, tile), 5) for tile, name in self._names.items()
        }

    def launch(self, tensors: Mapping[str, torch.Tensor]) -> StaticLaunch:
        return StaticLaunch({tile: tensors[name] for tile, name in self._names.items()})

    def over(self, tensors: Mapping[str, torch.Tensor]) -> TritonMetadata:
        return TritonMetadata(Layout(self._causal), self._device, captured=self.launch(tensors))

    def contents(self, layout: Layout) -> dict[str, NDArray[np.int32]]:
        table = _whole_sequences(layout)
        return {name: blocks_of(table, self._causal, 0, tile) for tile, name in self._names.items()}


def _kernel_takes(qkv: QKV) -> bool:
    """Whether the kernel runs on this device and takes these heads."""
    if not triton_ops.runs_on(qkv.query.device):
        return False
    from maxsimd.engine.ops.triton.attention import is_supported

    return is_supported(qkv)


def _queries_of_a_tile(qkv: QKV) -> int:
    from maxsimd.engine.ops.triton.attention import tiles_of

    return tiles_of(qkv).queries


def _whole_sequences(layout: Layout) -> NDArray[np.int64]:
    """The table of whole sequences."""
    return layout.whole_sequences[:, [0, 1, 0, 2]]


def _sequences_of(group: SharedGroup) -> Iterable[tuple[int, int, int, int]]:
    starts = range(group.rows.start, group.rows.stop, group.length)
    return ((start, group.length, start, group.length) for start in starts)


def _table(sequences: Iterable[tuple[int, int, int, int]]) -> NDArray[np.int64]:
    return np.array(list(sequences), dtype=np.int64)


def is_varlen_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has variable-length attention for this device and precision."""
    if not is_nvidia(device) or dtype not in _PRECISIONS:
        return False
    try:
        return bool({"window_size", "is_causal"} & _parameters(_varlen_attn()))
    except ImportError:
        return False


def is_flash_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash-attn is installed and runs on this device in this precision."""
    if not is_nvidia(device) or dtype not in _PRECISIONS or importlib.util.find_spec("flash_attn") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True, eq=False)
class VarlenMetadata(TritonMetadata):
    """The first row of each whole sequence, `offsets` int32 [sequences + 1], and its visible keys,
    `key_lengths` int32 [sequences], or None if each sees all of its keys."""

    offsets: torch.Tensor
    key_lengths: torch.Tensor | None


class _LibraryAttention(TritonAttention[VarlenMetadata]):
    supports_float32 = False

    def __init__(self, device: torch.device) -> None:
        # Without Triton plain torch attends to shared prefixes, in groups.
        self.arrangement = Arrangement(
            groups_whole=False, groups_shared=not triton_ops.runs_on(device), row_multiple=1
        )

    def prepare(self, layout: Layout, device: torch.device) -> VarlenMetadata:
        offsets = to_device(_offsets(layout, len(layout.whole_sequences)), device)
        key_lengths = None if layout.attends_to_all else to_device(_key_lengths(layout), device)
        return VarlenMetadata(layout, device, offsets, key_lengths)

    def full(self, qkv: QKV, metadata: VarlenMetadata) -> torch.Tensor:
        options = self._options(qkv, metadata)
        if options is None:
            return super().full(qkv, metadata)
        offsets, longest = metadata.offsets, metadata.layout.longest
        query, key, value = (_by_row(x) for x in (qkv.query, qkv.key, qkv.value))
        return self._call(query, key, value, offsets, offsets, longest, longest, **options)

    @abstractmethod
    def _options(self, qkv: QKV, metadata: VarlenMetadata) -> dict[str, Any] | None:
        """The keyword arguments of the library's function; None if it lacks something."""

    @abstractmethod
    def _call(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """The library's function: [rows, heads, head_dim]."""


class VarlenBackend(_LibraryAttention):
    """Attention by torch's kernel, which may be captured in a CUDA graph."""

    name = "varlen"

    def prepare_for_capture(self, tried: VarlenMetadata, size: CaptureSize) -> "StaticVarlen | None":
        # The kernel is launched for the longest possible sequence, ours for the blocks of a step: ours is
        # better if sequences may be long.
        blocks = size.sequences * -(-size.longest // _QUERIES_OF_A_BLOCK)
        if blocks > _MOST_BLOCKS:
            return None
        return StaticVarlen(tried, size, "seqused_k" in _parameters(_varlen_attn()))

    def _options(self, qkv: QKV, metadata: VarlenMetadata) -> dict[str, Any] | None:
        return varlen_options(qkv, metadata, _parameters(_varlen_attn()))

    def _call(self, *arguments: Any, **options: Any) -> torch.Tensor:
        out = _varlen_attn()(*arguments, **options)
        assert isinstance(out, torch.Tensor)
        return out


def varlen_options(qkv: QKV, metadata: VarlenMetadata, parameters: frozenset[str]) -> dict[str, Any] | None:
    """The keyword arguments for a `varlen_attn` with these parameters; None if it lacks one."""
    heads, _, head_dim = qkv.query.shape
    causal = metadata.layout.causal
    options: dict[str, Any] = {}
    if qkv.window is not None or (causal and "is_causal" not in parameters):
        options["window_size"] = _reach(causal, qkv.window)
    elif causal:
        options["is_causal"] = True
    if qkv.scaling != head_dim**-0.5:
        options["scale"] = qkv.scaling
    if qkv.key.shape[0] != heads:
        options["enable_gqa"] = True
    if metadata.key_lengths is not None:
        options["seqused_k"] = metadata.key_lengths
    return options if options.keys() <= parameters else None


class FlashBackend(_LibraryAttention):
    """Attention by flash-attn's kernel, for sequences that see all of their keys."""

    name = "flash"

    def _options(self, qkv: QKV, metadata: VarlenMetadata) -> dict[str, Any] | None:
        if metadata.key_lengths is not None:
            return None
        causal = metadata.layout.causal
        return {"softmax_scale": qkv.scaling, "causal": causal, "window_size": _reach(causal, qkv.window)}

    def _call(self, *arguments: Any, **options: Any) -> torch.Tensor:
        function = importlib.import_module("flash_attn").flash_attn_varlen_func
        out: torch.Tensor = function(*arguments, **options)
        return out


class StaticVarlen:
    """Metadata for torch's kernel in a CUDA graph, filled up with sequences without rows. If torch takes no
    key lengths, sequences must see all of their keys. Layers that ran by our own kernel when `tried` have
    their blocks here."""

    def __init__(self, tried: VarlenMetadata, size: CaptureSize, takes_key_lengths: bool) -> None:
        self._size = size
        self._device = tried.device
        self._takes_key_lengths = takes_key_lengths
        self._blocks = StaticBlocks(tried, size)
        self._layout = Layout(tried.layout.causal, (Group(0, 1, size.longest, (size.longest,)),))
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **self._blocks.shapes,
            "offsets": (size.sequences + 1,),
            **({"key lengths": (size.sequences,)} if takes_key_lengths else {}),
        }

    def over(self, tensors: Mapping[str, torch.Tensor]) -> VarlenMetadata:
        return VarlenMetadata(
            self._layout,
            self._device,
            tensors["offsets"],
            tensors.get("key lengths"),
            captured=self._blocks.launch(tensors),
        )

    def contents(self, layout: Layout) -> dict[str, NDArray[np.int32]] | None:
        if layout.longest > self._size.longest:
            return None
        found = self._blocks.contents(layout) | {"offsets": _offsets(layout, self._size.sequences)}
        if self._takes_key_lengths:
            found["key lengths"] = _key_lengths(layout)
        elif not layout.attends_to_all:
            return None
        return found


def _varlen_attn() -> Callable[..., Any]:
    from torch.nn.attention import varlen

    return varlen.varlen_attn


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _offsets(layout: Layout, sequences: int) -> NDArray[np.int32]:
    """The first row of each sequence and the end of the last, int32 [sequences + 1]; missing ones are
    empty."""
    offsets = np.zeros(sequences + 1, dtype=np.int32)
    ends = np.cumsum(layout.whole_sequences[:, 1])
    offsets[1 : len(ends) + 1] = ends
    offsets[len(ends) + 1 :] = ends[-1] if len(ends) else 0
    return offsets


def _key_lengths(layout: Layout) -> NDArray[np.int32]:
    return layout.whole_sequences[:, 2].astype(np.int32)


def _reach(causal: bool, window: int | None) -> tuple[int, int]:
    """The positions back and ahead that a token sees; -1 for no limit."""
    reach = -1 if window is None else window - 1
    return (reach, 0) if causal else (reach, reach)


def _by_row(heads: torch.Tensor) -> torch.Tensor:
    """[heads, rows, head_dim] as [rows, heads, head_dim] with the numbers of a head side by side."""
    rows = heads.transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
