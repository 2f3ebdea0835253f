"""Packed execution: layouts, attention and weight layout against their plain references."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.execution import first_token_gate, linear
from maxsimd.engine.execution.attention import base as attention
from maxsimd.engine.execution.attention import varlen
from maxsimd.engine.execution.attention.torch_grouped import (
    GROUPED,
    attend_first_rows,
    attend_grouped,
    attend_one_by_one,
)
from maxsimd.engine.execution.layout import (
    GROUP_COST_ROWS,
    Arrangement,
    group_by_length,
    in_powers_of_two,
    lay_out,
    round_length,
)
from maxsimd.engine.execution.modes import Packed, try_packed
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.engine.execution.padded_runner import PADDING, SMALL_BATCH, by_length
from maxsimd.engine.execution.prefill_kv import Carry
from maxsimd.engine.execution.selfcheck.float32 import in_float32
from maxsimd.engine.execution.selfcheck.samples import make_samples
from maxsimd.scheduler import Chunk, ResultSlot, Sequence, Step, Tokens

RAGGED = Arrangement(groups_whole=False, groups_shared=False, row_multiple=1)


def make_step(lengths: list[int], attended: list[int] | None = None) -> Step:
    chunks = []
    for key, length in enumerate(lengths):
        ids = np.arange(1, length + 1, dtype=np.int32) + 100 * key
        seen = attended[key] if attended else length
        chunks.append(
            Chunk(Sequence.text(key, ResultSlot(0, key), "all", Tokens(ids, attended_len=seen)), 0, length)
        )
    return Step(0, tuple(chunks))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_groups_hold_every_sequence_once_and_little_padding(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[place] for place in group)
        assert sum(longest - lengths[place] for place in group) <= GROUP_COST_ROWS
        parts = in_powers_of_two(group)
        assert [place for part in parts for place in part] == group
        assert all(len(part).bit_count() == 1 for part in parts)


@given(st.integers(1, 10_000))
def test_a_length_is_rounded_up_by_less_than_a_quarter_or_four_rows(length: int) -> None:
    assert length <= round_length(length) < length + max(4, length / 4)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.booleans(), st.integers(0, 2))
def test_the_cursor_finds_every_token_where_the_layout_put_it(
    lengths: list[int], grouped: bool, offset: int
) -> None:
    arrangement = GROUPED.arrangement if grouped else RAGGED
    batch = lay_out(make_step(lengths), {}, causal=False, arrangement=arrangement, position_offset=offset)
    for chunk, start in zip(batch.cursor.chunks, batch.cursor.starts, strict=True):
        rows = slice(start, start + len(chunk))
        assert batch.input_ids[rows].tolist() == chunk.sequence.tokens.ids.tolist()
        assert batch.position_ids[rows].tolist() == list(range(offset, offset + len(chunk)))
    if not grouped:
        assert len(batch.input_ids) == sum(lengths)


@st.composite
def attention_problems(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, bool, int | None]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    causal = draw(st.booleans())
    attended = lengths if causal else [draw(st.integers(1, length)) for length in lengths]
    kv_heads, repeats = draw(st.sampled_from([(2, 1), (1, 2), (2, 2)]))
    window = draw(st.none() | st.integers(2, 20))
    return lengths, attended, kv_heads, repeats, causal, window


def plain_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets_q: torch.Tensor,
    offsets_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor | None,
) -> torch.Tensor:
    """What torch documents of its variable-length attention, sequence by sequence in plain torch."""
    out = torch.empty(len(q), q.shape[1], v.shape[-1])
    left, right = window_size
    for i in range(len(offsets_q) - 1):
        rows = slice(int(offsets_q[i]), int(offsets_q[i + 1]))
        length = rows.stop - rows.start
        assert length <= longest_q
        keys = int(seqused_k[i]) if seqused_k is not None else length
        seen = slice(rows.start, rows.start + keys)
        distance = torch.arange(keys)[None, :] - torch.arange(length)[:, None]
        mask = torch.ones(length, keys, dtype=torch.bool)
        mask &= (distance >= -left) if left >= 0 else mask
        mask &= (distance <= right) if right >= 0 else mask
        heads = (x.transpose(0, 1) for x in (q[rows], k[seen], v[seen]))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        out[rows] = attended.transpose(0, 1)
    return out


@given(attention_problems())
def test_variable_length_attention_is_called_as_it_is_documented(
    problem: tuple[list[int], list[int], int, int, bool, int | None],
) -> None:
    """The kernel itself needs a GPU; what it is told is checked with a plain stand-in."""
    lengths, attended, kv_heads, repeats, causal, window = problem
    batch = lay_out(make_step(lengths, attended), {}, causal=causal, arrangement=RAGGED, position_offset=0)
    q, k, v = (torch.randn(heads, sum(lengths), 8) for heads in (kv_heads * repeats, kv_heads, kv_heads))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
        ours = varlen.attend_varlen(q, k, v, batch.layout, 0.3, window)
    plain = attend_one_by_one(q, k, v, batch.layout, 0.3, window)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


@given(attention_problems())
def test_grouped_attention_equals_attention_one_by_one(
    problem: tuple[list[int], list[int], int, int, bool, int | None],
) -> None:
    lengths, attended, kv_heads, repeats, causal, window = problem
    step = make_step(lengths, attended)
    random = torch.Generator().manual_seed(0)
    results = []
    states = {
        name: {chunk: torch.randn(heads, len(chunk), 8, generator=random) for chunk in step.chunks}
        for name, heads in (("q", kv_heads * repeats), ("k", kv_heads), ("v", kv_heads))
    }
    for attend, arrangement in ((attend_grouped, GROUPED.arrangement), (attend_one_by_one, RAGGED)):
        batch = lay_out(step, {}, causal=causal, arrangement=arrangement, position_offset=0)
        rows = len(batch.input_ids)
        q, k, v = (torch.randn(next(iter(parts.values())).shape[0], rows, 8) for parts in states.values())
        for tensor, parts in zip((q, k, v), states.values(), strict=True):
            for chunk, start in zip(batch.cursor.chunks, batch.cursor.starts, strict=True):
                tensor[:, start : start + len(chunk)] = parts[chunk]
        out = attend(q, k, v, batch.layout, 0.3, window)
        places = dict(zip(batch.cursor.chunks, batch.cursor.starts, strict=True))
        results.append([out[places[chunk] :][: len(chunk)] for chunk in step.chunks])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def test_bfloat16_attention_equals_float32() -> None:
    torch.manual_seed(0)
    step = make_step([40, 37, 12, 40, 5], [40, 30, 12, 33, 5])
    batch = lay_out(step, {}, causal=False, arrangement=GROUPED.arrangement, position_offset=0)
    q, k, v = (torch.randn(2, len(batch.input_ids), 16).bfloat16() for _ in range(3))
    rounded = attend_grouped(q, k, v, batch.layout, 0.25, None)
    exact = attend_one_by_one(q.float(), k.float(), v.float(), batch.layout, 0.25, None)
    for chunk, start in zip(batch.cursor.chunks, batch.cursor.starts, strict=True):
        rows = slice(start, start + len(chunk))
        torch.testing.assert_close(rounded[rows].float(), exact[rows], atol=2e-2, rtol=2e-2)


def test_steps_of_many_sizes_have_few_shapes() -> None:
    """Each new shape costs a kernel, so there must not be one for every step."""
    random = np.random.default_rng(0)
    rows, groups = set(), set()
    for _ in range(300):
        lengths = [int(length) for length in random.integers(5, 256, 15)]
        batch = lay_out(
            make_step(lengths), {}, causal=False, arrangement=GROUPED.arrangement, position_offset=0
        )
        rows.add(len(batch.input_ids))
        groups |= {(group.count, group.length) for group in batch.layout.groups}
        assert len(batch.input_ids) <= 1.1 * sum(lengths) + 64
    assert len(rows) < 100
    assert len(groups) < 150


@pytest.mark.parametrize("attended", [None, [9, 3, 17]])
def test_attention_for_first_rows_equals_the_first_rows_of_attention(attended: list[int] | None) -> None:
    torch.manual_seed(0)
    batch = lay_out(
        make_step([9, 5, 17], attended), {}, causal=False, arrangement=GROUPED.arrangement, position_offset=0
    )
    q, k, v = (torch.randn(2, len(batch.input_ids), 8) for _ in range(3))
    first = list(batch.cursor.starts)
    everything = attend_grouped(q, k, v, batch.layout, 0.3, None)
    only = attend_first_rows(q, k, v, batch.layout, 0.3)
    torch.testing.assert_close(only[first], everything[first])


def test_a_carry_gives_all_keys_so_far_also_when_a_step_is_retried() -> None:
    carry = Carry()
    keys = torch.randn(2, 10, 4)
    for _ in range(2):
        seen, _ = carry.extend(0, 0, keys[:, :4], keys[:, :4], keep=True)
        assert torch.equal(seen, keys[:, :4])
    for _ in range(2):
        seen, values = carry.extend(0, 4, keys[:, 4:], keys[:, 4:], keep=False)
        assert torch.equal(seen, keys)
        assert torch.equal(values, keys)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 products here")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
def test_a_prepacked_linear_equals_the_plain_one(bias: bool, gelu: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(96, 64, bias=bias).bfloat16()
    packed = linear.PrepackedLinear(plain, gelu)
    for rows in (1, 7, 130):
        x = torch.randn(1, rows, 96).bfloat16()
        with torch.inference_mode():
            expected = plain(x).float()
            expected = torch.nn.functional.gelu(expected) if gelu else expected
            torch.testing.assert_close(packed(x).float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("name", "exact"), [("gelu", True), ("gelu_new", False), ("relu", False)])
def test_only_the_exact_gelu_is_fused(name: str, exact: bool) -> None:
    assert linear._is_exact_gelu(ACT2FN[name]) is exact


def test_a_wrong_attention_is_found_out_at_load(bert_cross_encoder: str) -> None:
    """The proof must see it when sequences leak into each other."""
    model = load_model(EngineConfig(model=bert_cross_encoder), torch.device("cpu"))
    device = torch.device("cpu")
    samples = make_samples(model)

    def leaky(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)

    assert isinstance(try_packed(model, device, GROUPED, samples), Packed)
    model = load_model(EngineConfig(model=bert_cross_encoder), torch.device("cpu"))
    assert "results differ" in str(try_packed(model, device, replace(GROUPED, everywhere=leaky), samples))
    assert model.backbone.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("checkpoint", ["bert_cross_encoder", "xlm_roberta_cross_encoder"])
def test_the_last_layer_of_a_cross_encoder_runs_for_its_first_rows_alone(
    request: pytest.FixtureRequest, checkpoint: str
) -> None:
    device = torch.device("cpu")
    model = load_model(EngineConfig(model=request.getfixturevalue(checkpoint)), device)
    packed = try_packed(model, device, GROUPED, make_samples(model))
    assert isinstance(packed, Packed)
    gate = packed.gate
    assert gate is not None
    step = make_step([9, 5, 17])
    hidden, cursor = PackedRunner(model, device, GROUPED, gate).forward(step)
    assert len(hidden) == len(cursor.chunks) == 3
    gate.rows = None
    first_token_gate.remove(model.backbone, gate)
    full, full_cursor = PackedRunner(model, device, GROUPED).forward(step)
    torch.testing.assert_close(
        hidden[list(cursor.starts)], full[list(full_cursor.starts)], atol=1e-5, rtol=1e-5
    )


def test_a_model_that_needs_all_rows_gets_no_gate() -> None:
    model = load_model(EngineConfig(), torch.device("cpu"))
    packed = try_packed(model, torch.device("cpu"), GROUPED, make_samples(model))
    assert isinstance(packed, Packed)
    assert packed.gate is None


async def test_a_model_that_cannot_be_packed_runs_padded_with_a_warning(
    bert_cross_encoder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("not here")

    monkeypatch.setattr(attention, "attend", broken)
    with caplog.at_level(logging.WARNING, logger="maxsimd"):
        async with Engine(EngineConfig(model=bert_cross_encoder)) as engine:
            assert "not here" in (engine.device_model.prepared.not_packed or "")
            assert len((await engine.score("a", ["b", "c d e"])).scores) == 2
    assert "runs padded" in caplog.text


async def test_rotary_frequencies_keep_their_precision_in_bfloat16(qwen3_embedding: str) -> None:
    """Rounded ones put far tokens at wrong positions."""
    async with Engine(EngineConfig(model=qwen3_embedding, dtype="bfloat16")) as engine:
        backbone = engine.model.backbone
        assert backbone.rotary_emb.inv_freq.dtype is torch.float32
        assert {parameter.dtype for parameter in backbone.parameters()} == {torch.bfloat16}


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_padded_batches_hold_every_sequence_once_and_little_padding(lengths: list[int]) -> None:
    batches = by_length(lengths)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        rows = len(batch) * max(lengths[place] for place in batch)
        padding = rows - sum(lengths[place] for place in batch)
        assert rows <= SMALL_BATCH or padding <= PADDING * rows


def test_large_tables_are_not_converted_for_a_proof_and_small_ones_are() -> None:
    large, small = torch.nn.Embedding(70_000, 64), torch.nn.Embedding(10, 64)
    backbone = torch.nn.ModuleList([large, small, torch.nn.Linear(64, 4)]).bfloat16()
    ids = torch.tensor([0, 3, 9])
    expected = large(ids).float()
    with in_float32(backbone):
        assert large.weight.dtype is torch.bfloat16
        assert small.weight.dtype is torch.float32
        assert torch.equal(large(ids), expected)
    assert large(ids).dtype is torch.bfloat16
