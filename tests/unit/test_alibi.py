"""Attention with ALiBi: every backend that takes slopes gives, on random ragged input, what the formula says;
the others are never given any."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.execution.attention.base import AttentionBackend
from maxsimd.engine.execution.attention.cpu_kernel import CompiledBackend
from maxsimd.engine.execution.attention.interface import StepAttention
from maxsimd.engine.execution.attention.one_by_one import OneByOneBackend
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.attention.varlen import VarlenBackend
from maxsimd.engine.execution.lay_out import lay_out
from maxsimd.engine.ops.qkv import QKV
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
