"""Gemma2 with token compression (bge-reranker-v2.5-gemma2-lightweight): behind some layers the rows of the
document become fewer, each the mean of its neighbors, and the layers that follow run the shorter sequence.

Source: the card of BAAI/bge-reranker-v2.5-gemma2-lightweight and FlagEmbedding's `CostWiseGemmaModel`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Gemma2Model
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutput


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Masks of a padded batch, bool [n, rows] each: rows that are attended to, and those of the document."""

    attended: torch.Tensor
    of_document: torch.Tensor

    @property
    def last(self) -> torch.Tensor:
        """The last attended row of each sequence [n]; padding stands behind it."""
        return self.attended.sum(dim=1) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The neighboring rows that become one: the `first` of each group, and its `size`, 0 for padding; int64
    [n, longest] each. No group has more than `most` rows."""

    first: torch.Tensor
    size: torch.Tensor
    most: int

    def to(self, device: torch.device) -> "Groups":
        return Groups(self.first.to(device), self.size.to(device), self.most)

    def means(self, states: torch.Tensor) -> torch.Tensor:
        """The mean of each group's rows of `states` [n, rows, hidden], taken in float32: [n, longest,
        hidden]. It depends on the group's own rows alone."""
        total = states.new_zeros((*self.first.shape, states.shape[-1]), dtype=torch.float32)
        for i in range(self.most):
            rows = (self.first + i).clamp(max=states.shape[1] - 1)[..., None]
            taken = states.gather(1, rows.expand(-1, -1, states.shape[-1])).float()
            total += torch.where((i < self.size)[..., None], taken, 0.0)
        return (total / self.size.clamp(min=1)[..., None]).to(states.dtype)


def compressed(rows: Rows, ratio: int) -> tuple[Groups, Rows]:
    """Groups of rows that become one each in the documents of sequences, and the rows after that. The last
    group of a document may be smaller than the others."""
    within = rows.of_document.cumsum(dim=1) - 1  # [n, rows], counted from the document's first row
    begins = rows.attended & (~rows.of_document | (within % ratio == 0))
    number = (begins.cumsum(dim=1) - 1).clamp(min=0)  # [n, rows], the group of each row
    size = torch.zeros(len(begins), int(begins.sum(dim=1).max()), dtype=torch.int64)
    size.scatter_add_(1, number, rows.attended.long())
    first = torch.zeros_like(size)
    sequence, row = begins.nonzero(as_tuple=True)
    first[sequence, number[sequence, row]] = row
    attended = size > 0
    return Groups(first, size, ratio), Rows(attended, rows.of_document.gather(1, first) & attended)


class CompressingGemma2(Gemma2Model):
    """Gemma2 that compresses documents, as `config.compress_ratio` and `config.compress_layers` say.

    The tokens of a document have type 1, all others 0. The last state of each sequence comes out at the index
    of its last token; all others are zeros."""

    # Templates give them, whatever the tokenizer makes.
    needs_type_ids = True

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> BaseModelOutput:
        """The states [n, rows, hidden] of sequences [n, rows], which are padded on the right."""
        attended = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        # Shapes depend on these, so the CPU has them before the first layer runs, and waits for no layer.
        given = rows = Rows(attended.cpu() != 0, (types * attended).cpu() != 0)
        states = self.embed_tokens(input_ids)  # [n, rows, hidden]
        behind = self._compressed_behind()
        start = 0
        for stop in (*behind, len(self.layers)):
            states = self._run(states, rows.attended.to(states.device), start, stop)
            if stop != len(self.layers):
                groups, rows = compressed(rows, self.config.compress_ratio)
                states = groups.to(states.device).means(states)
            start = stop
        each = torch.arange(len(input_ids), device=states.device)
        out = states.new_zeros(*input_ids.shape, states.shape[-1])
        out[each, given.last.to(states.device)] = self.norm(states[each, rows.last.to(states.device)])
        return BaseModelOutput(last_hidden_state=out)

    def _compressed_behind(self) -> list[int]:
        """The layers to compress behind: those of the config or, where only a few layers are there for a
        proof, as many of the last before the last one."""
        layers = self.config.compress_layers
        most = [len(self.layers) - later for later in range(len(layers), 0, -1)]
        return [max(1, min(pair)) for pair in zip(layers, most, strict=True)]

    def _run(self, states: torch.Tensor, attended: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The states behind layer `stop` of those behind layer `start`, at positions from 0 on."""
        positions = torch.arange(states.shape[1], device=states.device)[None]
        inputs: dict[str, Any] = {"inputs_embeds": states, "attention_mask": attended}
        inputs |= {"position_ids": positions, "config": self.config, "past_key_values": None}
        masks = {
            "full_attention": create_causal_mask(**inputs),
            "sliding_attention": create_sliding_window_causal_mask(**inputs),
        }
        rotations = self.rotary_emb(states, positions)
        for i in range(start, stop):
            states = self.layers[i](
                states,
                attention_mask=masks[self.config.layer_types[i]],
                position_embeddings=rotations,
                position_ids=positions,
                past_key_values=None,
            )
        return states
