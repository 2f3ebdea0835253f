"""The interface of attention backends, and the metadata that a backend makes of a step's layout. Nothing here
depends on transformers, whose calls come through `interface.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.execution.layout import Arrangement, Layout
from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.pooling.ragged import to_device


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """What a backend needs of a step besides queries, keys and values, for `device`. Made once a step and
    read by every layer.

    Subclasses add what their backend needs. What only some steps need is a `cached_property`."""

    layout: Layout
    device: torch.device

    @cached_property
    def first_of_each(self) -> torch.Tensor:
        """The first row of each whole sequence, int64 [sequences]."""
        return to_device(torch.from_numpy(self.layout.whole_sequences[:, 0].copy()), self.device)


M = TypeVar("M", bound=AttentionMetadata)


class AttentionBackend(ABC, Generic[M]):
    """One way to attend within the sequences of a step, with metadata of its own.

    A subclass overrides what it does better and inherits the rest. `supports_float32` says whether it takes
    float32; `supports_first_rows` whether `first_rows` is worth calling. Where it is not, a last layer of
    which only the first rows are needed is computed whole. `supports_relative` says whether it adds what
    relative positions add to products, and `supports_causal_ends` whether causal sequences may end in tokens
    that none attends to."""

    name: str
    arrangement: Arrangement
    supports_float32: bool = True
    supports_first_rows: bool = False
    supports_relative: bool = False
    supports_causal_ends: bool = False

    @abstractmethod
    def prepare(self, layout: Layout, device: torch.device) -> M:
        """The metadata of a step."""

    @abstractmethod
    def full(self, qkv: QKV, metadata: M) -> torch.Tensor:
        """Attention within each whole sequence: [rows, heads, head_dim]. The rows of `layout.groups` come
        first among those of `qkv`; any rows after them are padding, whose result has no meaning."""

    def first_rows(self, qkv: QKV, metadata: M) -> torch.Tensor:
        """As `full`, but only the first row of each sequence is defined."""
        return self.full(qkv, metadata)

    @abstractmethod
    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: M, out: torch.Tensor) -> None:
        """Attention of the rows of each of `layout.prefill_chunks` to their context: all keys and values of
        their sequence up to and including the chunk. Writes these rows of `out` [rows, heads, head_dim]."""

    @abstractmethod
    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: M, out: torch.Tensor) -> None:
        """Cascade attention: each sequence in `layout.shared_groups` attends to its group's prefix and then
        to itself. `prefixes` has one entry a group. Writes these rows of `out` [rows, heads, head_dim]."""


@dataclass(frozen=True, slots=True, order=True)
class CaptureSize:
    """What a CUDA graph is captured for: steps of up to `rows` rows and `sequences` whole sequences, of up to
    `longest` rows each."""

    rows: int
    sequences: int
    longest: int

    def __str__(self) -> str:
        return f"{self.rows} rows and {self.sequences} sequences"


class StaticMetadata(Protocol):
    """Metadata for a CUDA graph: its tensors, int32 of these `shapes`, stay at one address while their
    contents change."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors by name."""
        ...

    def over(self, tensors: Mapping[str, torch.Tensor]) -> AttentionMetadata:
        """What the captured launches read, with these tensors for their contents."""
        ...

    def contents(self, layout: Layout) -> Mapping[str, NDArray[np.int32]] | None:
        """What the tensors hold for a layout, followed by zeros where it is shorter; None for a layout that
        the captured launches are not made for."""
        ...


@runtime_checkable
class CapturableBackend(Protocol):
    """A backend whose attention of whole sequences may be captured in a CUDA graph."""

    def prepare_for_capture(self, tried: Any, size: CaptureSize) -> StaticMetadata | None:
        """Metadata for steps of a size; None where a graph would cost more than it saves.

        `tried` is metadata with which the model has run, so that it shows what the model's layers asked
        for."""
        ...
