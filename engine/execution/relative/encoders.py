"""DeBERTa-v2 and -v3 (He et al. 2021, arXiv 2006.03654 and 2111.09543) and MPNet (Song et al. 2020, arXiv
2004.09297), packed.

DeBERTa's queries and keys are multiplied with each other and with projections of relative positions. MPNet's
layers share one bias by distance, as T5's do."""

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from maxsimd.engine.execution.layout import Layout
from maxsimd.engine.execution.relative import PackedEncoder, distances, in_heads, reach_of
from maxsimd.engine.ops.qkv import QKV, PositionBias, PositionContent
from maxsimd.pooling.ragged import to_device


class PackedDebertaV2(PackedEncoder):
    """Replaces a `DebertaV2Encoder`. Owns the positions of each layer, which depend on its weights alone and
    are projected once."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        # By attention, with the projections and the precision that made them.
        self._positions: WeakKeyDictionary[nn.Module, tuple[object, PositionContent]] = WeakKeyDictionary()

    def take_attention(
        self, backbone: nn.Module, arguments: Any, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Adds a mask, without which the backbone would wait for the device to look for padding."""
        everything = torch.ones_like(options["input_ids"], dtype=torch.float32)
        return super().take_attention(backbone, arguments, {**options, "attention_mask": everything})

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> BaseModelOutput:
        """[1, rows, hidden] to [1, rows, hidden]; masks mean nothing here."""
        layout = self.step.metadata.layout
        reach = reach_of(layout)
        hidden = hidden_states
        for index, layer in enumerate(self.layer):
            attended = layer.attention.output(self._attended(layer.attention.self, hidden, reach), hidden)
            hidden = layer.output(layer.intermediate(attended), attended)
            if index == 0 and self.inner.conv is not None:
                hidden = _convolved(self.inner.conv, hidden_states, hidden, layout)
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden,))

    def _attended(self, attention: Any, hidden: torch.Tensor, reach: int) -> torch.Tensor:
        heads = attention.num_attention_heads
        query, key, value = (
            in_heads(projection(hidden), heads)
            for projection in (attention.query_proj, attention.key_proj, attention.value_proj)
        )
        kinds = 1 + sum(kind in attention.pos_att_type for kind in ("c2p", "p2c"))
        content = self._content(attention, hidden.dtype, reach) if attention.relative_attention else None
        qkv = QKV(query, key, value, 1 / math.sqrt(query.shape[-1] * kinds), None, content)
        return self.step.attend(attention, qkv).flatten(1)[None]

    def _content(self, attention: Any, dtype: torch.dtype, reach: int) -> PositionContent:
        # Those of the positions that queries and keys are multiplied with.
        names = ("key_proj", "query_proj") if attention.share_att_key else ("pos_key_proj", "pos_query_proj")
        projections = [
            getattr(attention, name, None) if kind in attention.pos_att_type else None
            for name, kind in zip(names, ("c2p", "p2c"), strict=True)
        ]
        source = (projections, dtype)
        made_by, content = self._positions.get(attention, (None, None))
        if content is None or made_by != source or content.reach < reach:
            content = self._projected(attention, projections, reach)
            self._positions[attention] = source, content
        return content

    def _projected(
        self, attention: Any, projections: Sequence[nn.Module | None], reach: int
    ) -> PositionContent:
        span = attention.pos_ebd_size
        rows = self.inner.get_rel_embedding()[: 2 * span]  # [2 * span, hidden]
        # transformers counts from the key to the query, tables by distance from the query to the key.
        apart, buckets_a_side = -distances(reach, torch.device("cpu")), attention.position_buckets
        if buckets_a_side > 0:
            apart = make_log_bucket_position(apart, buckets_a_side, attention.max_relative_positions)
        buckets = to_device((apart.long() + span).clamp(0, 2 * span - 1), rows.device)
        tables = []
        for projection in projections:
            made = torch.zeros_like(rows)[None] if projection is None else projection(rows[None])
            table = in_heads(made, attention.num_attention_heads)
            tables.append(table[:, buckets].contiguous())
        return PositionContent(*tables)


def _convolved(conv: Any, embedded: torch.Tensor, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A `ConvLayer` on the embedded rows [1, rows, hidden] and those after the first layer. Sequences see
    neither other sequences nor their masked rows."""
    width = conv.conv.kernel_size[0]
    table = layout.whole_sequences
    rows = torch.cat([torch.arange(first, first + keys) for first, _, keys in table.tolist()])
    # Rows of zeros separate sequences, as many as the convolution sees to one side.
    apart = torch.repeat_interleave(torch.arange(len(table)), torch.from_numpy(table[:, 2].copy()))
    ends = torch.from_numpy(table[:, 2].cumsum() - table[:, 2])
    within = torch.arange(len(rows)) - ends[apart]
    spread = to_device(within + ends[apart] + width * (apart + 1), embedded.device)
    rows = to_device(rows, embedded.device)
    given = embedded.new_zeros(int(len(rows) + width * (len(table) + 1)), embedded.shape[-1])
    given[spread] = embedded[0, rows]
    made = conv.conv(given.t()[None])[0].t()[spread]  # [seen rows, hidden]
    added = torch.zeros_like(hidden[0])
    added[rows] = ACT2FN[conv.conv_act](made)
    normed: torch.Tensor = conv.LayerNorm(hidden + added[None])
    seen = torch.zeros_like(hidden[0, :, :1])
    seen[rows] = 1
    return normed * seen


class PackedMPNet(PackedEncoder):
    """Replaces an `MPNetEncoder`."""

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> BaseModelOutput:
        """[1, rows, hidden] to [1, rows, hidden]; masks mean nothing here."""
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
        return self.step.attend(attention, qkv).flatten(1)[None]


PACKED: dict[str, type[PackedEncoder]] = {"DebertaV2Encoder": PackedDebertaV2, "MPNetEncoder": PackedMPNet}
