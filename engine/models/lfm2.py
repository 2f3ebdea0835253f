"""LFM2's short convolutions: causal, as in transformers, or centered. Packed sequences do not see each
other's tokens.

Source: Liquid AI's LFM2 (transformers' `Lfm2ShortConv`); for centered ones LFM2.5-ColBERT-350M and
LFM2.5-Embedding-350M, whose code convolves with `kernel // 2` zeros on either side."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv


class ShortConvolution(nn.Module):
    """Replaces an `Lfm2ShortConv`, whose weights it has, of a kernel of K taps.

    With `centered` a token sees K // 2 tokens before and (K - 1) // 2 behind it, else K - 1 before it; of
    packed rows only those of its own sequence. With `leaves_out_padding` the states of tokens that are not
    attended to count as zero: padding, and what a query is expanded by."""

    def __init__(self, original: "Lfm2ShortConv", centered: bool, leaves_out_padding: bool) -> None:
        super().__init__()
        self.conv, self.in_proj, self.out_proj = original.conv, original.in_proj, original.out_proj
        self.leaves_out_padding = leaves_out_padding
        taps = self.conv.kernel_size[0]
        first = -(taps // 2) if centered else 1 - taps
        self._offsets = range(first, first + taps)  # of the tokens that the taps are for

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        row_positions: torch.Tensor | None = None,
        attended_rows: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Maps [n, tokens, hidden] to the same. A padded batch has an `attention_mask` [n, tokens]; packed
        rows have `row_positions` and `attended_rows` [1, rows], the latter 0 or 1. Raises NotImplementedError
        with a cache."""
        if past_key_values is not None:
            raise NotImplementedError("short convolutions are run without a cache here")
        attended = attention_mask if attended_rows is None else attended_rows
        if self.leaves_out_padding and attended is not None:
            hidden_states = (hidden_states * attended[..., None]).to(hidden_states.dtype)
        gate, out_gate, states = self.in_proj(hidden_states).chunk(3, dim=-1)  # [n, tokens, hidden] each
        gated = gate * states
        mixed = self._whole(gated) if row_positions is None else self._within(gated, row_positions)
        out: torch.Tensor = self.out_proj(out_gate * mixed)
        return out

    def _whole(self, states: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(states.transpose(1, 2), (-self._offsets[0], self._offsets[-1]))
        weight, bias = self.conv.weight, self.conv.bias
        return nn.functional.conv1d(padded, weight, bias, groups=states.shape[-1]).transpose(1, 2)

    def _within(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Each sequence by itself, as its tokens stand in the rows one behind the other: a row further on is
        of the same sequence if its position is as much further on. Sequences and padding begin at 0."""
        rows = states.shape[1]
        mixed = torch.zeros_like(states) if self.conv.bias is None else self.conv.bias.expand_as(states)
        for tap, offset in enumerate(self._offsets):
            weight = self.conv.weight[:, 0, tap]  # [hidden]
            if offset == 0:
                mixed = mixed + states * weight
                continue
            # The padding in front and behind with which rows move by the offset.
            shift = (max(-offset, 0), max(offset, 0))
            seen = nn.functional.pad(states, (0, 0, *shift))[:, shift[1] :][:, :rows]
            theirs = nn.functional.pad(positions, shift, value=-1)[:, shift[1] :][:, :rows]
            is_of_same = (theirs == positions + offset) & (theirs >= 0)
            mixed = mixed + torch.where(is_of_same[..., None], seen * weight, 0)
        return mixed


def replace_short_convolutions(model: nn.Module, centered: bool, leaves_out_padding: bool) -> None:
    """Replaces the short convolutions of an LFM2; other models are left as they are."""
    from transformers import Lfm2Model
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    backbone = getattr(model, "base_model", model)
    if not isinstance(backbone, Lfm2Model):
        return
    for layer in backbone.layers:
        if isinstance(getattr(layer, "conv", None), Lfm2ShortConv):
            layer.conv = ShortConvolution(layer.conv, centered, leaves_out_padding)
    backbone.config.use_cache = False  # older sentence-transformers do not say so in each call
    backbone.register_forward_pre_hook(_with_row_positions, with_kwargs=True)


def _with_row_positions(
    module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hands the positions of tokens on to the layers, which transformers gives to attention alone."""
    if options.get("position_ids") is not None:
        options["row_positions"] = options["position_ids"]
    return arguments, options


def short_convolutions_of(backbone: nn.Module) -> list[ShortConvolution]:
    return [module for module in backbone.modules() if isinstance(module, ShortConvolution)]
