"""Packed attention as transformers calls it: one function, registered under one name, that every layer of a
packed model calls with the step's attention among its keyword arguments.
"""

import sys
from dataclasses import dataclass
from typing import Any, Generic

import torch

from maxsimd.engine.execution.attention.base import AttentionBackend, M
from maxsimd.engine.execution.cls_only_last_layer import ClsOnlyLastLayer
from maxsimd.engine.models import bert
from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.engine.ops.relative import PositionBias

NAME = "maxsimd_packed"
_UNSUPPORTED = ("softcap", "s_aux")


@dataclass(frozen=True, slots=True, eq=False)
class StepAttention(Generic[M]):
    """The attention of one step: a backend with its metadata, and the last layer that computes only the first
    row of each sequence, if the model has one."""

    backend: AttentionBackend[M]
    metadata: M
    cls_only: ClsOnlyLastLayer | None = None

    @property
    def longest(self) -> int:
        """The tokens of the longest whole sequence of the step."""
        return self.metadata.layout.longest

    def of_layer(self, module: Any, qkv: QKV) -> torch.Tensor:
        """What the attention `module` of a layer gives: [rows, heads, head_dim]. Raises NotImplementedError
        for relative positions if the backend lacks them."""
        if qkv.relative is not None and not self.backend.supports_relative:
            raise NotImplementedError(f"attention by {self.backend.name} lacks relative positions")
        layout = self.metadata.layout
        if self.cls_only is not None and self.cls_only.belongs_to(module):
            return self.backend.first_rows(qkv, self.metadata)
        if layout.has_only_whole_sequences:
            return self.backend.full(qkv, self.metadata)
        out = qkv.new_output()
        if layout.groups:
            whole = slice(0, layout.groups[-1].rows.stop)
            out[whole] = self.backend.full(qkv.of_rows(whole), self.metadata)
        if layout.prefill_chunks:
            contexts = self._contexts(module.layer_idx, qkv)
            self.backend.with_prefill_kv(qkv, contexts, self.metadata, out)
        # After the chunks above: prefixes of the same step are among them.
        if layout.shared_groups:
            stored = {
                prefix: prefix.all_of(module.layer_idx)
                for prefix in {group.prefix for group in layout.shared_groups}
            }
            prefixes = [stored[group.prefix] for group in layout.shared_groups]
            self.backend.shared_prefix(qkv, prefixes, self.metadata, out)
        return out

    def _contexts(self, layer: int, qkv: QKV) -> list[KV]:
        """The keys and values that each prefill chunk attends to; stores its own where they are needed
        later."""
        return [
            chunk.prefill_kv.extend(
                layer,
                chunk.start,
                KV(qkv.key[:, chunk.rows], qkv.value[:, chunk.rows]),
                store=chunk.is_stored,
            )
            for chunk in self.metadata.layout.prefill_chunks
        ]


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_bias: Any = None,
    step_attention: StepAttention[Any] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query, key and value are [1, heads, rows, head_dim].

    Returns [1, rows, heads, head_dim]. Raises for features that packed attention lacks, so that the proof at
    load fails and the model runs padded."""
    if step_attention is None:  # where layers do not hand it on
        step_attention = getattr(module, "step_attention", None)
    if step_attention is None:
        raise RuntimeError("packed attention was called outside of a packed step")
    if any(kwargs.get(name) is not None for name in _UNSUPPORTED):
        raise NotImplementedError("packed attention supports neither softcap nor sinks")
    if position_bias is not None and not isinstance(position_bias, PositionBias):
        raise NotImplementedError("packed attention supports position bias by distance alone")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    qkv = QKV(query[0], key[0], value[0], scaling, sliding_window, position_bias)
    return step_attention.of_layer(module, qkv)[None], None


def register() -> None:
    """Registers the function for our own models and, if it is in use, with transformers. There is no function
    for masks: for a name without one transformers makes no mask, and the layout says which rows attend
    together."""
    bert.ATTENTION_FUNCTIONS[NAME] = attend
    if "transformers" in sys.modules:  # else no model of its own is loaded
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, attend)
