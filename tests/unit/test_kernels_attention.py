"""Attention by the compiled kernels against plain torch, on random ragged input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.execution.attention.cpu_kernel import (
    attend_after_prefix_compiled,
    attend_chunk_compiled,
    attend_compiled,
    attend_first_rows_compiled,
    compiled_attention,
)
from maxsimd.engine.execution.attention.torch_grouped import (
    attend_chunk,
    attend_first_rows,
    attend_groups_after_prefix,
    attend_one_by_one,
)
from maxsimd.engine.execution.layout import Layout, SharedGroup, lay_out
from maxsimd.engine.execution.prefill_kv import Carry
from tests.unit.test_kernels import needs_kernels
from tests.unit.test_packed import attention_problems, make_step

pytestmark = pytest.mark.usefixtures("two_threads")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
DTYPES = st.sampled_from(list(TOLERANCE))
HEAD_DIMS = st.sampled_from([8, 16, 24, 32, 80, 128])  # also such as the kernel does not take as they are


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float(), exact.float(), atol=tolerance, rtol=tolerance)


@needs_kernels
@given(attention_problems(), HEAD_DIMS, DTYPES)
@settings(deadline=None)
def test_attention_equals_attention_one_by_one(
    problem: tuple[list[int], list[int], int, int, bool, int | None], head_dim: int, dtype: torch.dtype
) -> None:
    lengths, attended, kv_heads, repeats, causal, window = problem
    step = make_step(lengths, attended)
    arrangement = compiled_attention().arrangement
    batch = lay_out(step, {}, causal=causal, arrangement=arrangement, position_offset=0)
    random = torch.Generator().manual_seed(sum(lengths))
    q, k, v = (
        torch.randn(sum(lengths), heads, head_dim, generator=random).to(dtype).transpose(0, 1)
        for heads in (kv_heads * repeats, kv_heads, kv_heads)
    )
    ours = attend_compiled(q, k, v, batch.layout, head_dim**-0.5, window)
    close(ours, attend_one_by_one(q.float(), k.float(), v.float(), batch.layout, head_dim**-0.5, window))
    if not causal:
        first = list(batch.cursor.starts)
        ours = attend_first_rows_compiled(q, k, v, batch.layout, head_dim**-0.5)
        exact = attend_first_rows(q.float(), k.float(), v.float(), batch.layout, head_dim**-0.5)
        close(ours[first], exact[first])


@needs_kernels
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 1)), min_size=1, max_size=6),
    st.sampled_from([(2, 1), (1, 3)]),
    st.none() | st.integers(2, 20),
    HEAD_DIMS,
    DTYPES,
)
@settings(deadline=None)
def test_attention_behind_prefixes_equals_the_plain_one(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int | None,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    kv_heads, repeats = heads
    random = torch.Generator().manual_seed(sum(length for length, _ in chunks))
    prefixes = [
        tuple(torch.randn(kv_heads, length, head_dim, generator=random).to(dtype) for _ in "kv")
        for length in (7, 20)
    ]
    carries = [Carry(), Carry()]
    rows = [sum(length for length, _ in chunks[:i]) for i in range(len(chunks) + 1)]
    shared = [
        SharedGroup(row, 1, length, carries[which])
        for row, (length, which) in zip(rows, chunks, strict=False)
    ]
    layout = Layout((), (), True, shared=tuple(shared))
    q, k, v = (
        torch.randn(n, rows[-1], head_dim, generator=random).to(dtype)
        for n in (kv_heads * repeats, kv_heads, kv_heads)
    )
    before = [prefixes[which] for _, which in chunks]
    ours = torch.empty(rows[-1], kv_heads * repeats, head_dim, dtype=dtype)
    attend_after_prefix_compiled(q, k, v, layout, before, head_dim**-0.5, window, ours)
    exact = torch.empty(ours.shape)
    wide = [(keys.float(), values.float()) for keys, values in before]
    attend_groups_after_prefix(q.float(), k.float(), v.float(), layout, wide, head_dim**-0.5, window, exact)
    close(ours, exact)


@needs_kernels
@given(st.integers(1, 40), st.integers(0, 50), st.none() | st.integers(2, 20), HEAD_DIMS, DTYPES)
@settings(deadline=None)
def test_attention_of_a_chunk_equals_the_plain_one(
    tokens: int, before: int, window: int | None, head_dim: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(tokens)
    q, k, v = (
        torch.randn(heads, before + tokens, head_dim, generator=random).to(dtype) for heads in (4, 2, 2)
    )
    layout, q = Layout((), (), True), q[:, before:]
    ours = attend_chunk_compiled(q, k, v, layout, head_dim**-0.5, window)
    close(ours, attend_chunk(q.float(), k.float(), v.float(), layout, head_dim**-0.5, window))


@needs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_to_long_sequences_equals_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    arrangement = compiled_attention().arrangement
    batch = lay_out(make_step([700, 33]), {}, causal=False, arrangement=arrangement, position_offset=0)
    q, k, v = ((torch.randn(2, 733, 64) * 3).to(dtype) for _ in range(3))
    ours = attend_compiled(q, k, v, batch.layout, 0.125, None)
    exact = attend_one_by_one(q.double(), k.double(), v.double(), batch.layout, 0.125, None)
    # Such wide heads make much of the last bits of products, with torch as with us.
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)


@needs_kernels
def test_values_may_have_heads_of_another_size_than_keys() -> None:
    torch.manual_seed(0)
    arrangement = compiled_attention().arrangement
    batch = lay_out(make_step([7, 3]), {}, causal=False, arrangement=arrangement, position_offset=0)
    q, k, v = torch.randn(2, 10, 24), torch.randn(2, 10, 24), torch.randn(2, 10, 40)
    close(
        attend_compiled(q, k, v, batch.layout, 0.2, None),
        attend_one_by_one(q, k, v, batch.layout, 0.2, None),
    )
