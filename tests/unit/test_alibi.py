"""Attention with ALiBi: every backend that takes slopes gives, on random ragged input, what the formula says;
the others are never given any."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.execution.attention.base import AttentionBackend, AttentionMetadata
from maxsimd.engine.execution.attention.check import find_mismatch
from maxsimd.engine.execution.attention.cpu_kernel import CompiledBackend
from maxsimd.engine.execution.attention.interface import NAME, StepAttention, register
from maxsimd.engine.execution.attention.one_by_one import OneByOneBackend
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.attention.varlen import VarlenBackend
from maxsimd.engine.execution.fused_layers.bert import fused_self_attention
from maxsimd.engine.execution.fused_layers.trial import recorded
from maxsimd.engine.execution.lay_out import lay_out
from maxsimd.engine.models.jina_bert import JinaBertConfig, JinaBertSelfAttention
from maxsimd.engine.ops.qkv import QKV
from tests.checkpoints import jina
from tests.checkpoints.shared import SharedCheckpoints
from tests.unit.test_kernels import needs_kernels
from tests.unit.test_packed import CPU, attention_problems, full, make_step

SLOPES = st.lists(st.floats(0, 2, width=32), min_size=4, max_size=4)


def _plain(qkv: QKV, start: int, length: int, keys: int) -> torch.Tensor:
    """One sequence, head by head: [length, heads, head_dim]."""
    assert qkv.slopes is not None
    apart = (torch.arange(length)[:, None] - torch.arange(keys)[None, :]).abs().float()
    hidden = apart >= (torch.inf if qkv.window is None else qkv.window)
    repeats = len(qkv.query) // len(qkv.key)
    outputs = []
    for head in range(len(qkv.query)):
        query = qkv.query[head, start : start + length].float()
        key, value = (x[head // repeats, start : start + keys].float() for x in (qkv.key, qkv.value))
        weights = query @ key.T * qkv.scaling - qkv.slopes[head] * apart
        weights = weights.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        outputs.append(weights.nan_to_num(0) @ value)  # a query that sees no key gives zero
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        pytest.param(CompiledBackend(), torch.float32, 1e-5, marks=needs_kernels),
        pytest.param(CompiledBackend(), torch.bfloat16, 4e-2, marks=needs_kernels),
        (GroupedBackend(), torch.float32, 1e-5),
        (GroupedBackend(), torch.bfloat16, 4e-2),
        (OneByOneBackend(), torch.float32, 1e-5),
    ],
)
@given(problem=attention_problems(), slopes=SLOPES)
@settings(max_examples=25)
def test_attention_with_slopes_is_the_formula(
    backend: AttentionBackend[Any],
    dtype: torch.dtype,
    tolerance: float,
    problem: tuple[list[int], list[int], int, int, bool, int | None],
    slopes: list[float],
) -> None:
    lengths, attended, kv_heads, repeats, causal, window = problem
    step = make_step(lengths, lengths if causal else attended)
    batch = lay_out(step, {}, causal=False, arrangement=backend.arrangement, position_offset=0)
    random = torch.Generator().manual_seed(sum(lengths))
    heads = kv_heads * repeats
    query, key, value = (
        torch.randn(len(batch.input_ids), n, 16, generator=random).to(dtype).transpose(0, 1)
        for n in (heads, kv_heads, kv_heads)
    )
    qkv = QKV(query, key, value, 0.3, window, torch.tensor(slopes)[:heads])
    whole = full(backend, qkv, batch.layout).float()
    first = backend.first_rows(qkv, backend.prepare(batch.layout, CPU)).float()
    for chunk, start in zip(batch.cursor.chunks, batch.cursor.starts, strict=True):
        expected = _plain(qkv, start, len(chunk), chunk.sequence.tokens.num_attended)
        found = whole[start : start + len(chunk)]
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(first[start], expected[0], atol=tolerance, rtol=tolerance)


def test_a_backend_without_slopes_is_not_given_any() -> None:
    backend = VarlenBackend(CPU)
    batch = lay_out(make_step([3], [3]), {}, causal=False, arrangement=backend.arrangement, position_offset=0)
    attention = StepAttention(backend, backend.prepare(batch.layout, CPU))
    query = torch.randn(2, 3, 16)
    with pytest.raises(NotImplementedError, match="takes no slopes"):
        attention.of_layer(None, QKV(query, query, query, 0.25, slopes=torch.ones(2)))


@pytest.fixture(scope="module")
def model(checkpoints: SharedCheckpoints) -> LoadedModel:
    """A JinaBERT of six heads, which is no power of two."""
    return load_model(EngineConfig(model=checkpoints(jina.embeddings_v2_code)), CPU)


class WithoutSlopes(OneByOneBackend):
    """A backend that would pass over them."""

    def full(self, qkv: QKV, metadata: AttentionMetadata) -> torch.Tensor:
        return super().full(replace(qkv, slopes=None), metadata)


def test_the_check_of_a_backend_gives_it_the_slopes_of_the_model(model: LoadedModel) -> None:
    for backend in (GroupedBackend(), OneByOneBackend()):
        assert find_mismatch(backend, model, CPU, torch.float32) is None
    assert find_mismatch(VarlenBackend(CPU), model, CPU, torch.float32) == "it takes no slopes (ALiBi)"
    assert "differs" in str(find_mismatch(WithoutSlopes(), model, CPU, torch.float32))


def test_a_fused_layer_hands_on_the_slopes() -> None:
    """The last layer of a classifier, whose queries and keys have no norms."""
    config = JinaBertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    register()
    config._attn_implementation = NAME
    fused = fused_self_attention(JinaBertSelfAttention(config).eval())
    assert fused is not None
    asked = recorded(lambda attention: fused(torch.randn(1, 5, 32), step_attention=attention)[0])
    assert asked is not None
    torch.testing.assert_close(asked[0].slopes, torch.tensor(config.alibi_slopes))


PLAIN_TORCH = {"kernels": "torch"}
NOT_PACKED = {"packing": "off"}


@pytest.mark.parametrize("settings", [PLAIN_TORCH, NOT_PACKED], ids=["plain torch", "not packed"])
async def test_however_it_is_run_it_embeds_alike(
    settings: dict[str, Any], checkpoints: SharedCheckpoints
) -> None:
    texts = ["one", "a few more words than one", "words " * 60, "three words here"]
    embeddings = []
    for each in ({}, settings):
        config = EngineConfig(model=checkpoints(jina.embeddings_v2_code), dtype="float32", threads=1, **each)
        async with Engine(config) as engine:
            packed = engine.device_model.prepared.not_packed is None
            assert packed == (each is not NOT_PACKED)
            embeddings.append((await engine.embed(texts)).embeddings)
    np.testing.assert_allclose(*embeddings, atol=2e-6, rtol=1e-5)
