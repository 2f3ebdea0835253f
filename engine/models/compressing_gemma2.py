"""Gemma2 with token compression (bge-reranker-v2.5-gemma2-lightweight): behind some layers the rows of the
document become fewer, each the mean of its neighbours, and the layers that follow run the shorter sequence.

Source: the card of BAAI/bge-reranker-v2.5-gemma2-lightweight and FlagEmbedding's `CostWiseGemmaModel`.
"""

import torch
from transformers import Gemma2Model
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutput

from maxsimd.engine.models.compression import Rows, compressed


class CompressingGemma2(Gemma2Model):
    """Gemma2 that compresses documents, as `config.compress_ratio` and `config.compress_layers` say.

    The tokens of a document have type 1, all others 0. Of the states that come out only the last of each
    sequence is one, at the index of the sequence's last token; all others are zeros."""

    # Told apart by whoever writes the pair, whatever the tokeniser makes.
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
        inputs = {
            "config": self.config,
            "inputs_embeds": states,
            "attention_mask": attended,
            "past_key_values": None,
            "position_ids": positions,
        }
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
