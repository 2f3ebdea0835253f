"""Attention for a CPU that runs our compiled kernels: sequences end to end, without padding.

A token's result is the same to the last bit whatever else is in the step, and however its sequence is cut."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch

from maxsimd.engine.execution.attention.backend import AttentionBackend, AttentionMetadata
from maxsimd.engine.execution.layout import Arrangement, Layout
from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops.cpu.attention import attention
from maxsimd.engine.ops.qkv import KV, QKV


def is_compiled_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernels for attention and linear layers run on this device in this precision."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and kernels.is_available()


class CompiledMetadata(AttentionMetadata):
    """Tables of sequences for the kernel, int64 [n, 4]: first row, queries, own keys, and index of the prefix
    or -1."""

    @cached_property
    def sequences(self) -> torch.Tensor:
        return _table(
            (group.first_row + i * group.length, group.length, keys, -1)
            for group in self.layout.groups
            for i, keys in enumerate(group.key_lengths)
        )

    @cached_property
    def first_queries(self) -> torch.Tensor:
        """The whole sequences with one query each."""
        sequences = self.sequences.clone()
        sequences[:, 1] = 1
        return sequences

    @cached_property
    def prefill_chunks(self) -> torch.Tensor:
        return _table(
            (chunk.first_row, chunk.num_tokens, chunk.num_tokens, index)
            for index, chunk in enumerate(self.layout.prefill_chunks)
        )

    @cached_property
    def shared_sequences(self) -> torch.Tensor:
        return _table(
            (group.first_row + i * group.length, group.length, group.length, index)
            for index, group in enumerate(self.layout.shared_groups)
            for i in range(group.count)
        )


class CompiledBackend(AttentionBackend):
    """Attention by our kernel, in one call for all sequences."""

    name = "compiled"
    arrangement = Arrangement(groups_whole=False, groups_shared=False, row_multiple=1)
    supports_relative = True
    supports_causal_ends = True

    def prepare(self, layout: Layout, device: torch.device) -> CompiledMetadata:
        return CompiledMetadata(layout, device)

    def full(self, qkv: QKV, metadata: CompiledMetadata) -> torch.Tensor:
        out = qkv.new_output()
        layout = metadata.layout
        attention(qkv, metadata.sequences, [], layout.causal, out)
        out[layout.groups[-1].rows.stop :] = 0
        return out

    def first_rows(self, qkv: QKV, metadata: CompiledMetadata) -> torch.Tensor:
        out = qkv.new_output()
        attention(qkv, metadata.first_queries, [], metadata.layout.causal, out)
        return out

    def with_prefill_kv(
        self, qkv: QKV, contexts: Sequence[KV], metadata: CompiledMetadata, out: torch.Tensor
    ) -> None:
        # A chunk's own keys are in the step's rows; the kernel takes those before them as a prefix.
        chunks = metadata.layout.prefill_chunks
        before = [
            KV(*(x[:, : x.shape[1] - chunk.num_tokens] for x in context))
            for chunk, context in zip(chunks, contexts, strict=True)
        ]
        attention(qkv, metadata.prefill_chunks, before, True, out)

    def shared_prefix(
        self, qkv: QKV, prefixes: Sequence[KV], metadata: CompiledMetadata, out: torch.Tensor
    ) -> None:
        attention(qkv, metadata.shared_sequences, prefixes, True, out)


def _table(sequences: Iterable[tuple[int, int, int, int]]) -> torch.Tensor:
    return torch.tensor(list(sequences), dtype=torch.int64)
