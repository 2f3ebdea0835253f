"""Short convolutions of sequences in one row give what each sequence gives alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from maxsimd.engine.checkpoint.short_convolution import (
    ShortConvolution,
)

HIDDEN = 8
LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=6)


def _config(taps: int, bias: bool = False) -> Lfm2Config:
    return Lfm2Config(
        vocab_size=50,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        conv_L_cache=taps,
        conv_bias=bias,
        layer_types=["conv", "full_attention"],
    )


def _original(taps: int, bias: bool = False) -> Lfm2ShortConv:
    torch.manual_seed(taps)
    return Lfm2ShortConv(_config(taps, bias), 0).eval()


@torch.inference_mode()
@settings(max_examples=25)
@given(LENGTHS, st.integers(1, 5), st.booleans(), st.booleans())
def test_sequences_in_a_row_see_nothing_of_each_other(
    lengths: list[tuple[int, int]], taps: int, centred: bool, bias: bool
) -> None:
    convolution = ShortConvolution(_original(taps, bias), centred, leaves_out_padding=False)
    states = [torch.randn(1, count, HIDDEN) for count, _ in lengths]
    rows, positions = [], []
    for item, (count, padding) in zip(states, lengths, strict=True):
        rows += [item, torch.randn(1, padding, HIDDEN)]
        positions += [*range(count), *[0] * padding]
    together = convolution(torch.cat(rows, dim=1), row_positions=torch.tensor([positions]))
    first = 0
    for item, (count, padding) in zip(states, lengths, strict=True):
        torch.testing.assert_close(
            together[:, first : first + count], convolution(item), atol=1e-6, rtol=1e-5
        )
        first += count + padding


@torch.inference_mode()
@settings(max_examples=25)
@given(LENGTHS, st.integers(1, 5), st.booleans())
def test_unattended_ends_are_left_out_of_rows_too(
    lengths: list[tuple[int, int]], taps: int, centred: bool
) -> None:
    convolution = ShortConvolution(_original(taps), centred, leaves_out_padding=True)
    states = [torch.randn(1, count + end, HIDDEN) for count, end in lengths]
    positions = torch.tensor([[i for count, end in lengths for i in range(count + end)]])
    attended = [(torch.arange(count + end) < count).long() for count, end in lengths]
    together = convolution(
        torch.cat(states, dim=1), row_positions=positions, attended_rows=torch.cat(attended)[None]
    )
    alone = [
        convolution(item, attention_mask=seen[None]) for item, seen in zip(states, attended, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), atol=1e-6, rtol=1e-5)
