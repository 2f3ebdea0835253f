"""Packed attention by libraries for GPUs: torch's variable-length attention, or the package flash-attn.

Both take whole sequences end to end. What they lack (chunks of a cut sequence and shared prefixes; with
flash-attn key lengths; with older versions of torch key lengths, windows and grouped heads) is inherited from
our own kernel, and from plain torch without Triton."""

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
        """The blocks, int32 [blocks, 5], for queries that see a prefix of `prefix_keys` keys before their
        own."""
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


_PRECISIONS = (torch.bfloat16, torch.float16)
# A block that finds no query for it costs a multiprocessor half a microsecond or so: of 1,024 a head, with 16
# heads, 132 multiprocessors with two at a time have done with them in about 30.
_QUERIES_OF_A_BLOCK, _MOST_BLOCKS = 128, 1024


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
    """Where each whole sequence begins: `offsets`, int32 [sequences + 1] on the device; and how many keys
    each may see, `key_lengths` int32 [sequences], or None if all sequences see all of their keys."""

    offsets: torch.Tensor
    key_lengths: torch.Tensor | None


class _LibraryAttention(TritonAttention[VarlenMetadata]):
    """What both libraries have in common. Nothing is padded, so that groups have one sequence each."""

    supports_float32 = False

    def __init__(self, device: torch.device) -> None:
        # Plain torch, which stands in for the kernel without Triton, wants shared prefixes in groups.
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
        """The keyword arguments of the library's function; None if it cannot do what is asked for."""

    @abstractmethod
    def _call(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """The library's function: [rows, heads, head_dim]."""


class VarlenBackend(_LibraryAttention):
    """Attention by torch's kernel, which may be captured in a CUDA graph.

    Of what this version of torch takes, it is asked only for what differs from plain attention over whole
    sequences."""

    name = "varlen"

    def prepare_for_capture(self, tried: VarlenMetadata, size: CaptureSize) -> "StaticVarlen | None":
        # The kernel is launched for the longest that each sequence may be. Our own, which is launched for the
        # blocks of a step, is better where sequences of a step differ and may be long.
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
    """The keyword arguments for a `varlen_attn` that has these parameters; None where it lacks one."""
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
    """Attention by flash-attn's kernel, where each sequence sees all of its keys."""

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
    """Metadata for torch's kernel in a CUDA graph. It is padded to the graph's sequences with some that have
    no rows. Where torch takes no key lengths, sequences must see all of their keys; `tried` shows whether
    some layers ran by our own kernel, whose blocks are then part of it."""

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
    """The names of the keyword arguments that a function takes."""
    return frozenset(inspect.signature(function).parameters)


def _offsets(layout: Layout, sequences: int) -> NDArray[np.int32]:
    """Where each sequence begins and the last one ends, int32 [sequences + 1]; those that the layout lacks
    have no rows."""
    offsets = np.zeros(sequences + 1, dtype=np.int32)
    ends = np.cumsum(layout.whole_sequences[:, 1])
    offsets[1 : len(ends) + 1] = ends
    offsets[len(ends) + 1 :] = ends[-1] if len(ends) else 0
    return offsets


def _key_lengths(layout: Layout) -> NDArray[np.int32]:
    """How many keys each sequence may see, int32 [sequences]."""
    return layout.whole_sequences[:, 2].astype(np.int32)


def _reach(causal: bool, window: int | None) -> tuple[int, int]:
    """How many positions back and ahead a token sees; -1 for no limit."""
    reach = -1 if window is None else window - 1
    return (reach, 0) if causal else (reach, reach)


def _by_row(heads: torch.Tensor) -> torch.Tensor:
    """Heads [heads, rows, head_dim] as the libraries read them, [rows, heads, head_dim]: with any strides, as
    long as the numbers of a head lie side by side."""
    rows = heads.transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
