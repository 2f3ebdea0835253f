"""Attention by the compiled kernels against plain torch, on random ragged input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.execution.attention.cpu_kernel import CompiledBackend
from maxsimd.engine.execution.attention.one_by_one import OneByOneBackend
from maxsimd.engine.execution.lay_out import lay_out
from maxsimd.engine.ops.qkv import QKV
from tests.unit.engine.execution.test_packed import CPU, full, make_step
from tests.unit.engine.ops.kernel_checks import Attention, behind_prefixes, chunks, whole_sequences
from tests.unit.engine.ops.test_kernels import needs_kernels

OURS, EXACT = CompiledBackend(), OneByOneBackend()

pytestmark = pytest.mark.usefixtures("two_threads")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
DTYPES = st.sampled_from(list(TOLERANCE))
HEAD_DIMS = st.sampled_from([8, 16, 24, 32, 80, 128])  # also such as the kernel does not take as they are


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float(), exact.float(), atol=tolerance, rtol=tolerance)


@needs_kernels
@given(
    whole_sequences(HEAD_DIMS, DTYPES, causal_ends=True)
    | chunks(HEAD_DIMS, DTYPES)
    | behind_prefixes(HEAD_DIMS, DTYPES)
)
@settings(deadline=None, max_examples=250)
def test_attention_equals_attention_one_by_one(problem: Attention) -> None:
    exact = problem.exactly()
    close(problem.by(OURS), exact)
    if problem.layout.groups:
        first = problem.layout.whole_sequences[:, 0].tolist()
        close(OURS.first_rows(problem.qkv, OURS.prepare(problem.layout, CPU))[first], exact[first])


@needs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_to_long_sequences_equals_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = lay_out(make_step([700, 33]), {}, causal=False, arrangement=OURS.arrangement, position_offset=0)
    q, k, v = ((torch.randn(2, 733, 64) * 3).to(dtype) for _ in range(3))
    ours = full(OURS, QKV(q, k, v, 0.125), batch.layout)
    exact = full(EXACT, QKV(q.double(), k.double(), v.double(), 0.125), batch.layout)
    # Such wide heads make much of the last bits of products, with torch as with us.
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)


@needs_kernels
def test_values_may_have_heads_of_another_size_than_keys() -> None:
    torch.manual_seed(0)
    batch = lay_out(make_step([7, 3]), {}, causal=False, arrangement=OURS.arrangement, position_offset=0)
    qkv = QKV(torch.randn(2, 10, 24), torch.randn(2, 10, 24), torch.randn(2, 10, 40), 0.2)
    close(full(OURS, qkv, batch.layout), full(EXACT, qkv, batch.layout))
