"""MPNet, packed. All layers share one bias by distance, as T5's do (Song et al. 2020, arXiv 2004.09297)."""

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from maxsimd.engine.execution.relative.encoder import PackedEncoder, distances, in_heads, reach_of
from maxsimd.engine.ops.qkv import QKV
from maxsimd.engine.ops.relative import PositionBias


class PackedMPNet(PackedEncoder):
    """Replaces an `MPNetEncoder`."""

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> BaseModelOutput:
        """The hidden states [1, rows, hidden] of packed rows; masks mean nothing here."""
        weight = self.inner.relative_attention_bias.weight  # [buckets, heads]
        apart = distances(reach_of(self.step.metadata.layout), weight.device)
        bias = PositionBias(weight[self.inner.relative_position_bucket(apart)].t().float().contiguous())
        hidden = hidden_states
        for layer in self.layer:
            attention = layer.attention
            projected = attention.attn.o(self._attended(attention.attn, hidden, bias))
            attended = attention.LayerNorm(projected + hidden)
            hidden = layer.output(layer.intermediate(attended), attended)
        return BaseModelOutput(last_hidden_state=hidden)

    def _attended(self, attention: Any, hidden: torch.Tensor, bias: PositionBias) -> torch.Tensor:
        query, key, value = (
            in_heads(projection(hidden), attention.num_attention_heads)
            for projection in (attention.q, attention.k, attention.v)
        )
        qkv = QKV(query, key, value, attention.attention_head_size**-0.5, None, bias)
        return self.step.of_layer(attention, qkv).flatten(1)[None]
