"""Attention by the compiled kernels against plain torch, on random ragged input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.execution.attention.cpu_kernel import CompiledBackend
from maxsimd.engine.execution.attention.one_by_one import OneByOneBackend
from maxsimd.engine.execution.lay_out import lay_out
from maxsimd.engine.execution.layout import Layout, PrefillChunk, SharedGroup
from maxsimd.engine.execution.prefill_kv import PrefillKV
from maxsimd.engine.ops.qkv import KV, QKV
from tests.unit.engine.execution.test_packed import CPU, attention_problems, full, make_step
from tests.unit.engine.ops.kernel_checks import in_float32
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
@given(attention_problems(causal_ends=True), HEAD_DIMS, DTYPES)
@settings(deadline=None)
def test_attention_equals_attention_one_by_one(
    problem: tuple[list[int], list[int], int, int, bool, int | None], head_dim: int, dtype: torch.dtype
) -> None:
    lengths, attended, kv_heads, repeats, causal, window = problem
    step = make_step(lengths, attended)
    batch = lay_out(step, {}, causal=causal, arrangement=OURS.arrangement, position_offset=0)
    random = torch.Generator().manual_seed(sum(lengths))
    q, k, v = (
        torch.randn(sum(lengths), heads, head_dim, generator=random).to(dtype).transpose(0, 1)
        for heads in (kv_heads * repeats, kv_heads, kv_heads)
    )
    qkv = QKV(q, k, v, head_dim**-0.5, window)
    exact = full(EXACT, in_float32(qkv), batch.layout)
    close(full(OURS, qkv, batch.layout), exact)
    first = list(batch.cursor.starts)
    close(OURS.first_rows(qkv, OURS.prepare(batch.layout, CPU))[first], exact[first])


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
        KV(*(torch.randn(kv_heads, length, head_dim, generator=random).to(dtype) for _ in "kv"))
        for length in (7, 20)
    ]
    prefill_kv = [PrefillKV(), PrefillKV()]
    rows = [sum(length for length, _ in chunks[:i]) for i in range(len(chunks) + 1)]
    shared = [
        SharedGroup(row, 1, length, prefill_kv[which])
        for row, (length, which) in zip(rows, chunks, strict=False)
    ]
    layout = Layout(True, shared_groups=tuple(shared))
    q, k, v = (
        torch.randn(n, rows[-1], head_dim, generator=random).to(dtype)
        for n in (kv_heads * repeats, kv_heads, kv_heads)
    )
    before = [prefixes[which] for _, which in chunks]
    ours = torch.empty(rows[-1], kv_heads * repeats, head_dim, dtype=dtype)
    exact = torch.empty(ours.shape)
    wide = [KV(prefix.key.float(), prefix.value.float()) for prefix in before]
    qkv = QKV(q, k, v, head_dim**-0.5, window)
    OURS.shared_prefix(qkv, before, OURS.prepare(layout, CPU), ours)
    EXACT.shared_prefix(in_float32(qkv), wide, EXACT.prepare(layout, CPU), exact)
    close(ours, exact)


@needs_kernels
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=3),
    st.none() | st.integers(2, 20),
    HEAD_DIMS,
    DTYPES,
)
@settings(deadline=None)
def test_attention_of_chunks_equals_the_plain_one(
    lengths: list[tuple[int, int]], window: int | None, head_dim: int, dtype: torch.dtype
) -> None:
    """Each chunk is given as its tokens and those before it."""
    rows = sum(tokens for tokens, _ in lengths)
    random = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(heads, rows, head_dim, generator=random).to(dtype) for heads in (4, 2, 2))
    chunks: list[PrefillChunk] = []
    contexts: list[KV] = []
    row = 0
    for tokens, before in lengths:
        chunks.append(PrefillChunk(row, before, before + tokens, PrefillKV(), is_stored=False))
        earlier = [torch.randn(2, before, head_dim, generator=random).to(dtype) for _ in "kv"]
        own = (x[:, row : row + tokens] for x in (k, v))
        contexts.append(KV(*(torch.cat(parts, dim=1) for parts in zip(earlier, own, strict=True))))
        row += tokens
    layout = Layout(True, prefill_chunks=tuple(chunks))
    qkv = QKV(q, k, v, head_dim**-0.5, window)
    ours, exact = torch.empty(rows, 4, head_dim, dtype=dtype), torch.empty(rows, 4, head_dim)
    wide = [KV(context.key.float(), context.value.float()) for context in contexts]
    OURS.with_prefill_kv(qkv, contexts, OURS.prepare(layout, CPU), ours)
    EXACT.with_prefill_kv(in_float32(qkv), wide, EXACT.prepare(layout, CPU), exact)
    close(ours, exact)


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
