"""Modules of our own beside those of transformers: BERT, ALiBi, token compression, short convolutions."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from maxsimd.engine import EngineConfig
from maxsimd.engine.config import compress_layers_of
from maxsimd.engine.execution.fused_layers import fused_self_attention, record_attention
from maxsimd.engine.execution.runner import ATTENTION_NAME, register_attention
from maxsimd.engine.models import bert
from maxsimd.engine.models.gemma2 import Rows, compressed
from maxsimd.engine.models.jina_bert import AlibiBias, JinaBertConfig, JinaBertSelfAttention, slopes_of
from maxsimd.engine.models.lfm2 import ShortConvolution


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
@torch.inference_mode()
def test_encoders_and_classifiers_equal_those_of_transformers(family: str) -> None:
    names = {field.name for field in fields(bert.EncoderConfig)} - {"settings", "_attn_implementation"}
    for i, activation in enumerate(sorted(bert.ACTIVATIONS)):
        config: Any = AutoConfig.for_model(
            family, vocab_size=50 + i, hidden_size=24, num_hidden_layers=1 + i % 2, hidden_act=activation,
            num_attention_heads=2 ** (i % 3), intermediate_size=30, max_position_embeddings=16 + 24 * (i % 2),
            type_vocab_size=1 + i % 2, layer_norm_eps=(1e-12, 1e-5)[i % 2], pad_token_id=i % 4,
            num_labels=1 + i % 3,
        )  # fmt: skip
        ours_config = bert.EncoderConfig(**{name: getattr(config, name) for name in names})
        ids, attended = torch.randint(4, 50, (3, 12)), torch.ones(3, 12, dtype=torch.bool)
        for row, padding in ((0, slice(7, None)), (1, slice(None, 3))):
            ids[row, padding], attended[row, padding] = config.pad_token_id, False
        types = torch.randint(0, config.type_vocab_size, ids.shape)
        inputs = {"input_ids": ids, "attention_mask": attended.long(), "token_type_ids": types}
        theirs = AutoModel.from_config(config).eval()
        ours = bert.ENCODERS[family](ours_config, has_pooler=True).eval()
        ours.load_state_dict(theirs.state_dict())
        for attention, some in (("sdpa", {"input_ids": ids}), ("sdpa", inputs), ("eager", inputs)):
            ours.set_attn_implementation(attention)
            found, exact = ours(**some), theirs(**some)
            torch.testing.assert_close(found.last_hidden_state[attended], exact.last_hidden_state[attended])
            torch.testing.assert_close(found.pooler_output, exact.pooler_output)
        theirs = AutoModelForSequenceClassification.from_config(config).eval()
        ours = bert.CLASSIFIERS[family](ours_config).eval()
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits)
    assert bert.ENCODERS[family](ours_config, has_pooler=False)(ids).pooler_output is None


CPU = torch.device("cpu")


def test_the_bias_is_the_slope_times_the_distance() -> None:
    for tokens in (1, 64, 65, 66, 129, 130, 1_000):
        query = torch.zeros(1, 4, tokens, 8)
        found = AlibiBias(4).reaching(tokens, CPU).terms(query, query, 1.0)
        apart = (torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]).abs()
        torch.testing.assert_close(found, torch.stack([-slope * apart for slope in slopes_of(4)]))
    config = JinaBertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    register_attention()
    config._attn_implementation = ATTENTION_NAME
    fused = fused_self_attention(JinaBertSelfAttention(config).eval())
    assert fused is not None
    bias, x = AlibiBias(4).reaching(5, CPU), torch.randn(1, 5, 32)
    asked = record_attention(lambda attention: fused(x, step_attention=attention, position_bias=bias)[0])
    assert asked is not None
    assert asked[0].relative is bias


# How many rows stand before the document, are its own, and stand behind it.
lengths = st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(1, 4))


def _rows(batch: list[tuple[int, int, int]]) -> Rows:
    longest = max(map(sum, batch))
    types = [[0] * a + [1] * b + [0] * (longest - a - b) for a, b, _ in batch]
    attended = [[1] * sum(each) + [0] * (longest - sum(each)) for each in batch]
    return Rows(torch.tensor(attended) != 0, torch.tensor(types) != 0)


@settings(max_examples=30)
@given(st.lists(lengths, min_size=1, max_size=5), st.sampled_from([2, 4, 8]))
def test_each_group_of_rows_becomes_their_mean(batch: list[tuple[int, int, int]], ratio: int) -> None:
    rows = _rows(batch)
    states = torch.randn(*rows.attended.shape, 3)
    groups, after = compressed(rows, ratio)
    found = groups.means(states)
    for i, (before, own, behind) in enumerate(batch):
        document = states[i, before : before + own].split(ratio) if own else ()
        end = before + own
        expected = [*states[i, :before], *(part.mean(0) for part in document), *states[i, end : end + behind]]
        count = len(expected)
        torch.testing.assert_close(found[i, :count], torch.stack(expected))
        assert after.attended[i].tolist() == [True] * count + [False] * (found.shape[1] - count)
        assert after.of_document[i].nonzero().flatten().tolist() == [*range(before, before + len(document))]
        assert after.last[i] == count - 1


def test_bfloat16_rows_are_averaged_in_float32() -> None:
    rows = _rows([(0, 3, 1)])
    states = torch.tensor([[[256.0], [1.0], [1.0], [7.0]]], dtype=torch.bfloat16)
    groups, _ = compressed(rows, 4)
    assert groups.means(states).tolist() == [[[86.0], [7.0]]]


def test_layers_are_numbers_with_commas_and_ratios_are_few() -> None:
    assert (compress_layers_of("40, 24,24"), compress_layers_of("8")) == ((24, 40), (8,))
    for wrong in ("", "a", "0", "-1,2", "1;2", "1.5"):
        with pytest.raises(ValueError, match="compress_layers must be numbers from 1 on"):
            EngineConfig(compress_layers=wrong)
    for ratio in (-1, 0, 3, 16):
        with pytest.raises(ValueError, match=f"compress_ratio must be one of 1, 2, 4, 8, not {ratio}"):
            EngineConfig(compress_ratio=ratio)


HIDDEN = 8
LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=6)


def _original(taps: int, bias: bool = False) -> Lfm2ShortConv:
    torch.manual_seed(taps)
    config = Lfm2Config(hidden_size=HIDDEN, conv_L_cache=taps, conv_bias=bias, layer_types=["conv"] * 32)
    return Lfm2ShortConv(config, 0).eval()


@torch.inference_mode()
@settings(max_examples=25)
@given(LENGTHS, st.integers(1, 5), st.booleans(), st.booleans())
def test_sequences_are_apart(lengths: list[tuple[int, int]], taps: int, centered: bool, bias: bool) -> None:
    convolution = ShortConvolution(_original(taps, bias), centered, leaves_out_padding=False)
    states = [torch.randn(1, count, HIDDEN) for count, _ in lengths]
    rows, positions = [], []
    for item, (count, padding) in zip(states, lengths, strict=True):
        rows += [item, torch.randn(1, padding, HIDDEN)]
        positions += [*range(count), *[0] * padding]
    joined = convolution(torch.cat(rows, dim=1), row_positions=torch.tensor([positions]))
    first = 0
    for item, (count, padding) in zip(states, lengths, strict=True):
        torch.testing.assert_close(joined[:, first : first + count], convolution(item), atol=1e-6, rtol=1e-5)
        first += count + padding


@torch.inference_mode()
@settings(max_examples=25)
@given(LENGTHS, st.integers(1, 5), st.booleans())
def test_rows_leave_out_unattended_ends(lengths: list[tuple[int, int]], taps: int, centered: bool) -> None:
    convolution = ShortConvolution(_original(taps), centered, leaves_out_padding=True)
    states = [torch.randn(1, count + end, HIDDEN) for count, end in lengths]
    positions = torch.tensor([[i for count, end in lengths for i in range(count + end)]])
    attended = [(torch.arange(count + end) < count).long() for count, end in lengths]
    rows, seen = torch.cat(states, dim=1), torch.cat(attended)[None]
    together = convolution(rows, row_positions=positions, attended_rows=seen)
    alone = [convolution(one, attention_mask=seen[None]) for one, seen in zip(states, attended, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), atol=1e-6, rtol=1e-5)
