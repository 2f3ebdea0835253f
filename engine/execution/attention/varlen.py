"""Packed attention by libraries for GPUs: torch's variable-length attention, or the package flash-attn.

Both take whole sequences end to end. What they lack (chunks of a cut sequence and shared prefixes; key
lengths with flash-attn) is inherited from our own kernel, and from plain torch without Triton.
"""

import importlib
import importlib.util
import inspect
from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from maxsimd.engine.execution.attention.triton_kernel import TritonAttention, TritonMetadata
from maxsimd.engine.execution.layout import Arrangement, Layout
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.qkv import QKV
from maxsimd.pooling.transfer import to_device

_PRECISIONS = (torch.bfloat16, torch.float16)


def is_varlen_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has variable-length attention for this device and precision."""
    if device.type != "cuda" or dtype not in _PRECISIONS:
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    # Earlier versions have neither grouped-query attention nor key lengths of their own.
    return {"enable_gqa", "seqused_k", "window_size"} <= set(inspect.signature(varlen_attn).parameters)


def is_flash_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash-attn is installed and runs on this device in this precision."""
    if device.type != "cuda" or dtype not in _PRECISIONS or importlib.util.find_spec("flash_attn") is None:
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
        offsets = to_device(_offsets(layout, len(layout.groups)), device)
        key_lengths = None
        if not layout.attends_to_all:
            key_lengths = to_device(_key_lengths(layout, len(layout.groups)), device)
        return VarlenMetadata(layout, device, offsets, key_lengths)

    def full(self, qkv: QKV, metadata: VarlenMetadata) -> torch.Tensor:
        offsets, longest = metadata.offsets, metadata.layout.longest
        query, key, value = (x.transpose(0, 1).contiguous() for x in (qkv.query, qkv.key, qkv.value))
        arguments = (query, key, value, offsets, offsets, longest, longest)
        return self._call(arguments, qkv, metadata)

    @abstractmethod
    def _call(self, arguments: tuple[Any, ...], qkv: QKV, metadata: VarlenMetadata) -> torch.Tensor:
        """The library's function on its positional arguments: [rows, heads, head_dim]."""


class VarlenBackend(_LibraryAttention):
    """Attention by torch's kernel, which may be captured in a CUDA graph."""

    name = "varlen"

    def prepare_for_capture(
        self, layout: Layout, max_sequences: int, device: torch.device
    ) -> "VarlenCaptureMetadata":
        return VarlenCaptureMetadata(layout, max_sequences, device)

    def _call(self, arguments: tuple[Any, ...], qkv: QKV, metadata: VarlenMetadata) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            *arguments,
            scale=qkv.scaling,
            window_size=_reach(metadata.layout.causal, qkv.window),
            enable_gqa=qkv.key.shape[0] != qkv.query.shape[0],
            seqused_k=metadata.key_lengths,
        )
        assert isinstance(out, torch.Tensor)
        return out


class FlashBackend(_LibraryAttention):
    """Attention by flash-attn's kernel, where each sequence sees all of its keys."""

    name = "flash"

    def full(self, qkv: QKV, metadata: VarlenMetadata) -> torch.Tensor:
        if not metadata.layout.attends_to_all:
            return TritonAttention.full(self, qkv, metadata)
        return super().full(qkv, metadata)

    def _call(self, arguments: tuple[Any, ...], qkv: QKV, metadata: VarlenMetadata) -> torch.Tensor:
        function = importlib.import_module("flash_attn").flash_attn_varlen_func
        causal = metadata.layout.causal
        out: torch.Tensor = function(
            *arguments,
            softmax_scale=qkv.scaling,
            causal=causal,
            window_size=_reach(causal, qkv.window),
        )
        return out


class VarlenCaptureMetadata:
    """Metadata for torch's kernel at addresses that stay the same. It is padded to `max_sequences` with
    sequences that have no rows."""

    def __init__(self, layout: Layout, max_sequences: int, device: torch.device) -> None:
        self._max_sequences = max_sequences
        self._offsets = to_device(_offsets(layout, max_sequences), device).clone()
        self._key_lengths = to_device(_key_lengths(layout, max_sequences), device).clone()
        self.metadata = VarlenMetadata(layout, device, self._offsets, self._key_lengths)

    def load(self, layout: Layout) -> None:
        """Replaces the contents by those of another layout, before a replay."""
        device = self.metadata.device
        self._offsets.copy_(to_device(_offsets(layout, self._max_sequences), device))
        self._key_lengths.copy_(to_device(_key_lengths(layout, self._max_sequences), device))


def _offsets(layout: Layout, sequences: int) -> torch.Tensor:
    """Where each sequence begins and the last one ends, int32 [sequences + 1]; those that the layout lacks
    have no rows."""
    lengths = [group.length for group in layout.groups]
    padding = [0] * (sequences - len(lengths))
    return torch.tensor([0, *accumulate(lengths + padding)], dtype=torch.int32)


def _key_lengths(layout: Layout, sequences: int) -> torch.Tensor:
    """How many keys each sequence may see, int32 [sequences]."""
    lengths = [group.key_lengths[0] for group in layout.groups]
    return torch.tensor(lengths + [0] * (sequences - len(lengths)), dtype=torch.int32)


def _reach(causal: bool, window: int | None) -> tuple[int, int]:
    """How many positions back and ahead a token sees; -1 for no limit."""
    reach = -1 if window is None else window - 1
    return (reach, 0) if causal else (reach, reach)
