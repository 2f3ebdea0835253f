"""Packed execution: layouts, attention and weight layout against their plain references."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.execution import layout as layouts
from maxsimd.engine.execution.attention.backend import AttentionBackend, GroupedBackend, OneByOneBackend
from maxsimd.engine.execution.attention.cpu import CompiledBackend
from maxsimd.engine.execution.modes import PADDING, SMALL_BATCH, Packed, by_length, try_packed
from maxsimd.engine.execution.runner import PackedRunner, remove_cls_only
from maxsimd.engine.execution.self_check.samples import make_samples
from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops.qkv import KV, QKV, PositionBias, PositionContent, RelativePositions
from maxsimd.scheduler import Chunk, ResultSlot, Step, Tokens, TokenSequence

GROUPED = GroupedBackend()
RAGGED = OneByOneBackend.arrangement
CPU = torch.device("cpu")


def full(backend: AttentionBackend, qkv: QKV, layout: layouts.Layout) -> torch.Tensor:
    return backend.full(qkv, backend.prepare(layout, qkv.query.device))


def make_step(lengths: list[int], attended: list[int] | None = None) -> Step:
    chunks = []
    for i, length in enumerate(lengths):
        ids = (np.arange(length, dtype=np.int32) + 7 * i) % 97 + 1
        seen = attended[i] if attended else length
        text = TokenSequence.text(i, ResultSlot(0, i), "all", Tokens(ids, attended_len=seen))
        chunks.append(Chunk(text, 0, length))
    return Step(0, tuple(chunks))


def laid_out(
    lengths: list[int], attended: list[int] | None = None, backend: AttentionBackend = GROUPED,
    causal: bool = False, position_offset: int = 0,
) -> layouts.PackedBatch:  # fmt: skip
    return layouts.lay_out(
        make_step(lengths, attended), {}, causal=causal, arrangement=backend.arrangement,
        position_offset=position_offset,
    )  # fmt: skip


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.booleans(), st.integers(0, 2))
def test_the_cursor_finds_every_token_of_a_layout(lengths: list[int], grouped: bool, offset: int) -> None:
    batch = laid_out(lengths, backend=GROUPED if grouped else OneByOneBackend(), position_offset=offset)
    for chunk, start in zip(batch.cursor.chunks, batch.cursor.starts, strict=True):
        rows = slice(start, start + len(chunk))
        assert batch.input_ids[rows].tolist() == chunk.sequence.tokens.ids.tolist()
        assert batch.position_ids[rows].tolist() == list(range(offset, offset + len(chunk)))
    if not grouped:
        assert len(batch.input_ids) == sum(lengths)


@pytest.mark.parametrize(("start", "stop", "expected"), [(0, 7, [2, 1, 1, 3, 4, 1, 5]), (2, 6, [1, 3, 4, 1])])
def test_padding_tokens_of_texts_are_not_counted(start: int, stop: int, expected: list[int]) -> None:
    tokens = Tokens(np.array([5, 1, 1, 7, 8, 1, 9], dtype=np.int32))
    step = Step(0, (Chunk(TokenSequence.text(0, ResultSlot(0, 0), "embed", tokens), start, stop),))
    options: dict[str, Any] = {"causal": False, "arrangement": RAGGED, "position_offset": 2}
    batch = layouts.lay_out(step, {0: layouts.PrefillKV()}, **options, uncounted_id=1)
    assert batch.position_ids.tolist() == expected


# Lengths, how much of each is attended to, heads of keys, how many queries share one, causal, and a window.
Problem = tuple[list[int], list[int], int, int, bool, int | None]


@st.composite
def attention_problems(draw: st.DrawFn, causal_ends: bool = False) -> Problem:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    causal = draw(st.booleans())
    attended = lengths if causal and not causal_ends else [draw(st.integers(1, length)) for length in lengths]
    kv_heads, repeats = draw(st.sampled_from([(2, 1), (1, 2), (2, 2)]))
    return lengths, attended, kv_heads, repeats, causal, draw(st.none() | st.integers(2, 20))


@given(attention_problems(causal_ends=True))
@settings(max_examples=40)
def test_grouped_attention_equals_attention_one_by_one(problem: Problem) -> None:
    lengths, attended, kv_heads, repeats, causal, window = problem
    step = make_step(lengths, attended)
    random, results = torch.Generator().manual_seed(0), []
    states = {
        name: {chunk: torch.randn(heads, len(chunk), 8, generator=random) for chunk in step.chunks}
        for name, heads in (("q", kv_heads * repeats), ("k", kv_heads), ("v", kv_heads))
    }
    backends: tuple[AttentionBackend, ...] = (GROUPED, OneByOneBackend())
    for backend in backends:
        batch = layouts.lay_out(step, {}, causal=causal, arrangement=backend.arrangement, position_offset=0)
        rows = len(batch.input_ids)
        q, k, v = (torch.randn(next(iter(parts.values())).shape[0], rows, 8) for parts in states.values())
        for tensor, parts in zip((q, k, v), states.values(), strict=True):
            for chunk, start in zip(batch.cursor.chunks, batch.cursor.starts, strict=True):
                tensor[:, start : start + len(chunk)] = parts[chunk]
        out = full(backend, QKV(q, k, v, 0.3, window), batch.layout)
        first_rows = dict(zip(batch.cursor.chunks, batch.cursor.starts, strict=True))
        results.append([out[first_rows[chunk] :][: len(chunk)] for chunk in step.chunks])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("native", "tolerance"), [(True, 2e-2), (False, 2**-8)])
def test_bfloat16_equals_float32(native: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsimd.engine.execution.attention.backend.multiplies_bfloat16", lambda: native)
    torch.manual_seed(0)
    batch = laid_out([40, 37, 12, 40, 5], [40, 30, 12, 33, 5])
    q, k, v = (torch.randn(2, len(batch.input_ids), 16).bfloat16() for _ in range(3))
    for relative in (None, PositionContent(*(torch.randn(2, 2 * 40 + 1, 16).bfloat16() for _ in range(2)))):
        rounded = full(GROUPED, QKV(q, k, v, 0.25, relative=relative), batch.layout)
        assert rounded.dtype is torch.bfloat16
        exact_relative = relative and PositionContent(relative.keys.float(), relative.queries.float())
        plain = QKV(q.float(), k.float(), v.float(), 0.25, None, exact_relative)
        exact = full(OneByOneBackend(), plain, batch.layout)
        for chunk, start in zip(batch.cursor.chunks, batch.cursor.starts, strict=True):
            rows = slice(start, start + len(chunk))
            torch.testing.assert_close(rounded[rows].float(), exact[rows], atol=tolerance, rtol=tolerance)


def test_bfloat16_behind_earlier_tokens_equals_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsimd.engine.execution.attention.backend.multiplies_bfloat16", lambda: False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 10, 16).bfloat16() for _ in range(3))
    before = KV(*(torch.randn(2, 9, 16).bfloat16() for _ in range(2)))
    second = layouts.PrefillChunk(0, 0, 9, layouts.PrefillKV(), is_stored=False)
    chunk = layouts.Layout(True, prefill_chunks=(second,))
    shared = layouts.Layout(True, shared_groups=(layouts.SharedGroup(0, 2, 5, layouts.PrefillKV()),))

    def attended(backend: AttentionBackend, cast: torch.dtype) -> torch.Tensor:
        qkv, context = QKV(q.to(cast), k.to(cast), v.to(cast), 0.25), KV(*(x.to(cast) for x in before))
        outputs = [qkv.new_output().zero_() for _ in range(2)]
        backend.with_prefill_kv(qkv, [context], backend.prepare(chunk, CPU), outputs[0])
        backend.shared_prefix(qkv, [context], backend.prepare(shared, CPU), outputs[1])
        assert outputs[0].dtype is cast
        return torch.cat(outputs).float()

    rounded, exact = attended(GROUPED, torch.bfloat16), attended(OneByOneBackend(), torch.float32)
    torch.testing.assert_close(rounded, exact, atol=2**-8, rtol=2**-8)


@given(st.lists(st.integers(1, 60) | st.integers(1, 300), min_size=1, max_size=40))
def test_groups_and_padded_batches_hold_each_once_and_little_padding(lengths: list[int]) -> None:
    groups, batches = layouts.group_by_length(lengths), by_length(lengths)
    for made in (groups, batches):
        assert sorted(index for group in made for index in group) == list(range(len(lengths)))
        for group in made:
            rows = len(group) * max(lengths[index] for index in group)
            padding = rows - sum(lengths[index] for index in group)
            if made is groups:
                assert padding <= layouts.GROUP_COST_ROWS
            else:
                assert rows <= SMALL_BATCH or padding <= PADDING * rows
    for group in groups:
        parts = layouts.in_powers_of_two(group)
        assert [index for part in parts for index in part] == group
        assert all(len(part).bit_count() == 1 for part in parts)


@given(st.integers(1, 10_000))
def test_a_length_is_rounded_up_a_little(length: int) -> None:
    assert length <= layouts.round_length(length) < length + max(4, length / 4)


class LeakyBackend(GroupedBackend):
    def full(self, qkv: QKV, metadata: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(qkv.query, qkv.key, qkv.value).transpose(0, 1)


@pytest.mark.parametrize("checkpoint", ["bert_cross_encoder", "xlm_roberta_cross_encoder"])
def test_a_last_layer_runs_for_first_rows_alone(request: pytest.FixtureRequest, checkpoint: str) -> None:
    model = load_model(EngineConfig(model=request.getfixturevalue(checkpoint)), CPU)
    packed = try_packed(model, CPU, GROUPED, make_samples(model))
    assert isinstance(packed, Packed)
    cls_only = packed.cls_only
    assert cls_only is not None
    step = make_step([9, 5, 17])
    hidden, cursor = PackedRunner(model, CPU, GROUPED, cls_only).forward(step)
    assert len(hidden) == len(cursor.chunks) == 3
    cls_only.rows = None
    remove_cls_only(model.backbone, cls_only)
    whole, other = PackedRunner(model, CPU, GROUPED).forward(step)
    torch.testing.assert_close(hidden[list(cursor.starts)], whole[list(other.starts)], atol=1e-5, rtol=1e-5)


async def test_rotary_frequencies_keep_their_precision_in_bfloat16(qwen3_embedding: str) -> None:
    async with Engine(EngineConfig(model=qwen3_embedding, dtype="bfloat16")) as engine:
        backbone = engine.model.backbone
        assert backbone.rotary_emb.inv_freq.dtype is torch.float32
        assert backbone.embed_tokens.weight.dtype is torch.bfloat16


NO_KERNELS = pytest.mark.skipif(not kernels.is_available(), reason="this processor cannot run the kernels")
COMPILED = pytest.param(CompiledBackend(), marks=NO_KERNELS, id="compiled")
RELATIVE_BACKENDS = [OneByOneBackend(), GroupedBackend(), COMPILED]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
HEADS, HEAD_DIM = 2, 24
LENGTH = st.sampled_from([1, 2, 12, 13, 31, 33, 70, 130])
LENGTHS = st.lists(st.tuples(LENGTH, st.integers(0, 3)), min_size=1, max_size=5)


def drawn(kind: str, reach: int, dtype: torch.dtype, seed: int) -> RelativePositions:
    rng = torch.Generator().manual_seed(seed)
    if kind == "bias":
        return PositionBias(torch.randn(HEADS, 2 * reach + 1, generator=rng))
    keys, queries = (torch.randn(HEADS, 2 * reach + 1, HEAD_DIM, generator=rng).to(dtype) for _ in range(2))
    return PositionContent(keys, queries)


def drawn_qkv(rows: int, relative: RelativePositions | None, dtype: torch.dtype) -> QKV:
    random = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(HEADS, rows, HEAD_DIM, generator=random).to(dtype) for _ in range(3))
    return QKV(q, k, v, HEAD_DIM**-0.5, None, relative)


def written_out(qkv: QKV, layout: layouts.Layout) -> torch.Tensor:
    """[rows, heads, head_dim], one product after the other."""
    out = torch.zeros(qkv.query.shape[1], HEADS, HEAD_DIM)
    for first, length, keys in layout.whole_sequences.tolist():
        q, k, v = (x[:, first : first + length].float() for x in (qkv.query, qkv.key, qkv.value))
        products = q @ k[:, :keys].transpose(1, 2)
        apart = torch.arange(keys)[None] - torch.arange(length)[:, None]
        match qkv.relative:
            case PositionBias() as bias:
                products = products * qkv.scaling + bias.by_distance[:, apart + bias.reach]
            case PositionContent() as content:
                tables = (content.keys, content.queries)
                near_keys, near_queries = (table.float()[:, apart + content.reach] for table in tables)
                products = products + torch.einsum("hqd,hqkd->hqk", q, near_keys)
                products = products + torch.einsum("hkd,hqkd->hqk", k[:, :keys], near_queries)
                products = products * qkv.scaling
        out[first : first + length] = (products.softmax(-1) @ v[:, :keys]).transpose(0, 1)
    return out


@pytest.mark.parametrize("backend", RELATIVE_BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", ["bias", "content"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@given(lengths=LENGTHS, spare=st.integers(0, 70))
@settings(deadline=None, max_examples=6)
def test_distances_add_to_products_as_written_out(
    backend: Any, kind: str, dtype: torch.dtype, lengths: list[tuple[int, int]], spare: int
) -> None:
    # The last so many keys are not attended to.
    attended = [max(1, length - hidden) for length, hidden in lengths]
    batch = laid_out([length for length, _ in lengths], attended, backend)
    qkv = drawn_qkv(len(batch.input_ids), drawn(kind, batch.layout.longest - 1 + spare, dtype, spare), dtype)
    exact = written_out(qkv, batch.layout)
    chunks = zip(batch.cursor.chunks, batch.cursor.starts, strict=True)
    rows = torch.cat([torch.arange(first, first + len(chunk)) for chunk, first in chunks])
    metadata = backend.prepare(batch.layout, CPU)
    ours = backend.full(qkv, metadata).float()
    torch.testing.assert_close(ours[rows], exact[rows], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    first = list(batch.cursor.starts)
    ours = backend.first_rows(qkv, metadata).float()
    torch.testing.assert_close(ours[first], exact[first], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
