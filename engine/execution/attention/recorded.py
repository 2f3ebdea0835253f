"""A backend that records how a model's layers call it, for the proof at load."""

from collections.abc import Sequence

import torch

from maxsimd.engine.execution.attention.base import AttentionBackend, M
from maxsimd.engine.execution.layout import Layout
from maxsimd.engine.ops.qkv import KV, QKV


class RecordedBackend(AttentionBackend[M]):
    """Another backend, with the number of calls for whole sequences and the windows that they asked for."""

    def __init__(self, inner: AttentionBackend[M]) -> None:
        self.name = inner.name
        self.arrangement = inner.arrangement
        self.supports_float32 = inner.supports_float32
        self.supports_first_rows = inner.supports_first_rows
        self.supports_relative = inner.supports_relative
        self.supports_causal_ends = inner.supports_causal_ends
        self.calls = 0
        self.windows: set[int | None] = set()
        self._inner = inner

    def prepare(self, layout: Layout, device: torch.device) -> M:
        return self._inner.prepare(layout, device)

    def full(self, qkv: QKV, metadata: M) -> torch.Tensor:
        self.calls += 1
        self.windows.add(qkv.window)
        return self._inner.full(qkv, metadata)

    def first_rows(self, qkv: QKV, metadata: M) -> torch.Tensor:
        return self._inner.first_rows(qkv, metadata)

    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: M, out: torch.Tensor) -> None:
        self._inner.with_prefill_kv(qkv, contexts, metadata, out)

    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: M, out: torch.Tensor) -> None:
        self._inner.shared_prefix(qkv, prefixes, metadata, out)
