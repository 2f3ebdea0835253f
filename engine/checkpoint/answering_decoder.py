"""The backbone of a reranker with an encoder and a decoder, which takes one step."""

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from maxsimd.engine.ops.qkv import QKV


class AnsweringDecoder(torch.nn.Module):
    """A T5 with its decoder's first step: the decoder's state, from which the logits of the first word of an
    answer are made, stands in the first row of each sequence in place of the encoder's, and so is pooled as
    a first token is.

    In a packed step, all sequences' decoders run together, one row a sequence, and attend to the encoder's
    rows of their own sequence as the first row of one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.encoder
        self.decoder = model.decoder
        self.config = model.encoder.config
        self._start = int(model.config.decoder_start_token_id)
        scaled = getattr(model.config, "scale_decoder_outputs", False)
        self._scale = model.config.d_model**-0.5 if scaled else 1.0

    def get_input_embeddings(self) -> Any:
        return self.encoder.get_input_embeddings()

    def set_attn_implementation(self, name: str) -> None:
        """Of the encoder; the decoder has a way of its own for packed steps."""
        self.encoder.set_attn_implementation(name)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        step_attention: Any = None,
        **others: Any,
    ) -> BaseModelOutput:
        """The states [n, tokens, hidden] of token ids [n, tokens], or [1, rows, hidden] of a packed step."""
        options = {} if step_attention is None else {"step_attention": step_attention}
        encoded = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **options)
        states = encoded.last_hidden_state.clone()
        if step_attention is None:
            starts = torch.full((len(input_ids), 1), self._start, device=input_ids.device)
            decoded = self.decoder(
                input_ids=starts,
                encoder_hidden_states=encoded.last_hidden_state,
                encoder_attention_mask=attention_mask,
                use_cache=False,
            )
            states[:, 0] = decoded.last_hidden_state[:, 0] * self._scale
        else:
            first = step_attention.metadata.first_of_each
            states[0, first] = self._decoded(encoded.last_hidden_state, first, step_attention) * self._scale
        return BaseModelOutput(last_hidden_state=states)

    def _decoded(self, encoded: torch.Tensor, first: torch.Tensor, step_attention: Any) -> torch.Tensor:
        """The decoder's states [sequences, hidden] behind its start, for packed rows [1, rows, hidden] of
        which those in `first` are the first of a sequence."""
        start = torch.full_like(first, self._start)
        states = self.decoder.embed_tokens(start)[None]  # [1, sequences, hidden]
        for block in self.decoder.block:
            alone, cross, feed_forward = block.layer
            # A token that sees itself alone gives its own value, whatever its position.
            states = states + alone.SelfAttention.o(alone.SelfAttention.v(alone.layer_norm(states)))
            attention = cross.EncDecAttention
            queries = encoded.new_zeros(encoded.shape[1], attention.inner_dim)
            queries[first] = attention.q(cross.layer_norm(states))[0]
            query, key, value = (
                rows.unflatten(-1, (attention.n_heads, -1)).transpose(0, 1)
                for rows in (queries, attention.k(encoded)[0], attention.v(encoded)[0])
            )
            qkv = QKV(query, key, value, attention.scaling)
            attended = step_attention.backend.first_rows(qkv, step_attention.metadata)[first]
            states = feed_forward(states + attention.o(attended.flatten(1)[None]))
        decoded: torch.Tensor = self.decoder.final_layer_norm(states)[0]
        return decoded
