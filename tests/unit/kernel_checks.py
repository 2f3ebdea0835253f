"""What every Triton kernel must do, on random ragged input: run interpreted on a CPU, or on a GPU as it
is."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.execution.attention.torch_grouped import (
    attend_chunk,
    attend_groups_after_prefix,
    attend_one_by_one,
)
from maxsimd.engine.execution.layout import Layout, SharedGroup
from maxsimd.engine.execution.prefill_kv import Carry
from maxsimd.engine.scoring.maxsim import maxsim_reference
from maxsimd.pooling.ragged import Ragged
from tests.unit.test_maxsim import problems, random_ragged
from tests.unit.test_packed import RAGGED, attention_problems, make_step

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours.float().cpu(), exact.float(), atol=tolerance, rtol=tolerance)


def on(items: Ragged, device: str) -> Ragged:
    scales = None if items.scales is None else items.scales.to(device)
    return Ragged(items.values.to(device), items.offsets, scales)


def check_maxsim(device: str) -> None:
    from maxsimd.engine.scoring.maxsim.triton import maxsim_triton

    @settings(max_examples=40, deadline=None)
    @given(problems(), st.sampled_from([1, 2, 7]), st.sampled_from(DTYPES))
    def compare(
        problem: tuple[Ragged, Ragged, list[tuple[int, int]]], parts: int, dtype: torch.dtype
    ) -> None:
        queries, documents, pairs = problem
        queries, documents = queries.decoded(dtype), documents.decoded(dtype)
        exact = maxsim_reference(queries, documents, pairs)
        # Products of rounded numbers are exact in float32, so precision makes no difference.
        ours = maxsim_triton(on(queries, device), on(documents, device), pairs, parts)
        torch.testing.assert_close(ours.cpu(), exact, atol=1e-5, rtol=1e-5)

    @settings(max_examples=15, deadline=None)
    @given(problems(), st.sampled_from(DTYPES))
    def compare_int8(problem: tuple[Ragged, Ragged, list[tuple[int, int]]], dtype: torch.dtype) -> None:
        queries, documents, pairs = problem
        queries = queries.decoded(dtype)
        scales = documents.values.abs().amax(dim=1).clamp(min=1e-12) / 127
        rounded = Ragged(
            (documents.values / scales[:, None]).round().to(torch.int8), documents.offsets, scales
        )
        exact = maxsim_reference(queries, rounded.decoded(torch.float32), pairs)
        ours = maxsim_triton(on(queries, device), on(rounded, device), pairs)
        torch.testing.assert_close(ours.cpu(), exact, atol=1e-4, rtol=1e-4)

    compare()
    compare_int8()
    # More dimensions than a tile has.
    queries, documents = random_ragged([5, 33], 200, 1), random_ragged([70, 0, 1], 200, 2)
    pairs = [(0, 0), (1, 0), (1, 1), (0, 2)]
    exact = maxsim_reference(queries, documents, pairs)
    queries, documents = on(queries, device), on(documents, device)
    torch.testing.assert_close(maxsim_triton(queries, documents, pairs).cpu(), exact, atol=1e-5, rtol=1e-5)
    assert maxsim_triton(queries, documents, []).shape == (0,)


def _heads(count: int, rows: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """As models hand them on: a view [heads, rows, dim] of rows in which heads stand side by side."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, dim, generator=random).to(dtype).transpose(0, 1)


def _on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]


HEAD_DIMS = st.sampled_from([32, 64, 80, 128, 256, 24])
PRECISIONS = st.sampled_from(DTYPES)


def check_attention(device: str) -> None:
    from maxsimd.engine.execution.attention.triton_kernel import attend_triton
    from maxsimd.engine.execution.layout import lay_out

    @settings(max_examples=60, deadline=None)
    @given(attention_problems(), HEAD_DIMS, PRECISIONS)
    def whole(problem: tuple[Any, ...], dim: int, dtype: torch.dtype) -> None:
        lengths, attended, kv_heads, repeats, causal, window = problem
        step = make_step(lengths, attended)
        batch = lay_out(step, {}, causal=causal, arrangement=RAGGED, position_offset=0)
        q = _heads(kv_heads * repeats, sum(lengths), dim, dtype, 0)
        k, v = (_heads(kv_heads, sum(lengths), dim, dtype, seed) for seed in (1, 2))
        ours = attend_triton(*_on(device, q, k, v), batch.layout, dim**-0.5, window)
        exact = attend_one_by_one(q.float(), k.float(), v.float(), batch.layout, dim**-0.5, window)
        close(ours, exact.nan_to_num(), dtype)

    whole()


def check_attention_of_chunks(device: str) -> None:
    from maxsimd.engine.execution.attention.triton_kernel import attend_chunk_triton

    @settings(max_examples=25, deadline=None)
    @given(st.integers(1, 70), st.integers(0, 90), HEAD_DIMS, PRECISIONS, st.none() | st.integers(2, 20))
    def chunk(tokens: int, earlier: int, dim: int, dtype: torch.dtype, window: int | None) -> None:
        q = _heads(4, tokens, dim, dtype, 0)
        k, v = (_heads(2, earlier + tokens, dim, dtype, seed) for seed in (1, 2))
        layout = Layout((), (), True)
        ours = attend_chunk_triton(*_on(device, q, k, v), layout, dim**-0.5, window)
        close(ours, attend_chunk(q.float(), k.float(), v.float(), layout, dim**-0.5, window), dtype)

    chunk()


def check_attention_behind_prefixes(device: str) -> None:
    from maxsimd.engine.execution.attention.triton_kernel import attend_after_prefix_triton

    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1)), min_size=1, max_size=6),
        st.integers(1, 80),
        HEAD_DIMS,
        PRECISIONS,
        st.none() | st.integers(2, 60),
    )
    def after_prefix(
        sequences: list[tuple[int, int]], shared: int, dim: int, dtype: torch.dtype, window: int | None
    ) -> None:
        carries = [Carry(), Carry()]
        row, groups = 0, []
        for length, which in sorted(sequences, key=lambda item: item[1]):
            groups.append(SharedGroup(row, 1, length, carries[which]))
            row += length
        both = [[_heads(2, shared + n, dim, dtype, seed + n) for seed in (3, 5)] for n in range(2)]
        prefixes: Any = [tuple(_on(device, *both[carries.index(group.prefix)])) for group in groups]
        wide: Any = [(keys.float().cpu(), values.float().cpu()) for keys, values in prefixes]
        q = _heads(4, row, dim, dtype, 0)
        k, v = (_heads(2, row, dim, dtype, seed) for seed in (1, 2))
        layout = Layout((), (), True, None, tuple(groups))
        ours = torch.full((row, 4, dim), 9.0, dtype=dtype, device=device)
        exact = torch.empty(row, 4, dim)
        attend_after_prefix_triton(*_on(device, q, k, v), layout, prefixes, dim**-0.5, window, ours)
        attend_groups_after_prefix(q.float(), k.float(), v.float(), layout, wide, dim**-0.5, window, exact)
        close(ours, exact, dtype)

    after_prefix()


def check_projection(device: str) -> None:
    from maxsimd.engine.ops.triton.projection import project

    @settings(max_examples=40, deadline=None)
    @given(
        st.integers(1, 90),
        st.integers(0, 80),
        st.sampled_from([16, 48, 100]),
        st.sampled_from([16, 96, 128, 200, 1024]),
        st.sampled_from(DTYPES),
        st.booleans(),
        st.booleans(),
    )
    def compare(
        tokens: int, kept: int, width: int, dim: int, dtype: torch.dtype, biased: bool, normalized: bool
    ) -> None:
        random = torch.Generator().manual_seed(tokens)
        hidden = torch.randn(tokens, width, generator=random).to(dtype)
        rows = torch.randint(tokens, (kept,), generator=random)
        weight = (torch.randn(dim, width, generator=random) * width**-0.5).to(dtype)
        bias = torch.randn(dim, generator=random) if biased else None
        there = [tensor.to(device) for tensor in (hidden, rows, weight)]
        more = None if bias is None else bias.to(device)
        ours = project(*there, more, normalized, 1e-12, torch.float32)
        exact = torch.nn.functional.linear(hidden[rows].float(), weight.float(), bias)
        if normalized:
            exact = torch.nn.functional.normalize(exact, dim=-1)
        torch.testing.assert_close(ours.cpu(), exact, atol=1e-5, rtol=1e-5)
        rounded = project(*there, more, normalized, 1e-12, torch.bfloat16)
        assert rounded.dtype is torch.bfloat16
        torch.testing.assert_close(rounded.float().cpu(), exact, atol=2e-2, rtol=1e-2)

    compare()
    nothing = torch.zeros(16, 16, device=device)
    places = torch.arange(2, device=device)
    assert (project(nothing, places, nothing, None, True, 1e-12, torch.float32) == 0).all()


CHECKS = [
    check_maxsim,
    check_attention,
    check_attention_of_chunks,
    check_attention_behind_prefixes,
    check_projection,
]
