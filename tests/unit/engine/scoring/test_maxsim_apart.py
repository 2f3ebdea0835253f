"""MaxSim of documents that lie each by itself, in any precision: the same bits as end to end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.scoring.maxsim import Rows, maxsim_apart_avx512, maxsim_avx512, maxsim_reference
from maxsimd.pooling.ragged import Ragged
from tests.unit.pairs import Pairs, pairs_of

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(not kernels.is_available(), reason="this processor cannot run the kernel"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def document(length: int, dim: int, dtype: torch.dtype, seed: int) -> Ragged:
    """Numbers from very small to large, not at the beginning of their memory."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(length + 1, dim, generator=random)
    if dtype is torch.int8:
        scales = torch.rand(length + 1, generator=random) + 0.01
        return Ragged((rows * 30).clamp(-127, 127).to(dtype)[1:], (0, length), scales[1:])
    return Ragged((rows * 10 ** (rows[:, :1] - 1)).to(dtype)[1:], (0, length))


def rows_of(documents: list[Ragged]) -> list[Rows]:
    return [(one.values, one.scales) for one in documents]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Ragged, list[Ragged], Pairs]:
    dim = draw(st.sampled_from([1, 2, 15, 16, 34, 128]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    queries = Ragged.from_lengths(torch.randn(sum(lengths), dim).to(dtype), lengths)
    shapes = draw(st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), min_size=1, max_size=8))
    documents = [document(length, dim, kind, i) for i, (length, kind) in enumerate(shapes)]
    pair = st.tuples(st.integers(0, len(lengths) - 1), st.integers(0, len(documents) - 1))
    return queries, documents, pairs_of(draw(st.lists(pair, max_size=12)))


@given(problems())
def test_the_bits_are_those_of_documents_end_to_end(problem: tuple[Ragged, list[Ragged], Pairs]) -> None:
    queries, documents, pairs = problem
    dtype = queries.values.dtype
    joined = Ragged.join([one.decoded(dtype) for one in documents])
    scores = maxsim_apart_avx512(queries, rows_of(documents), pairs)
    assert torch.equal(scores, maxsim_avx512(queries, joined, pairs))
    expected = maxsim_reference(queries.decoded(torch.float32), joined.decoded(torch.float32), pairs)
    assert torch.allclose(scores, expected, rtol=1e-2, atol=1e-2)


def test_rows_that_do_not_follow_each_other_are_read_as_they_are() -> None:
    queries = Ragged(torch.randn(5, 16), (0, 5))
    wide = torch.randn(9, 32)
    pairs = pairs_of([(0, 0)])
    scores = maxsim_apart_avx512(queries, [(wide[:, ::2], None)], pairs)
    assert torch.equal(scores, maxsim_avx512(queries, Ragged(wide[:, ::2].contiguous(), (0, 9)), pairs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_that_the_kernel_does_not_take(dtype: torch.dtype) -> None:
    """bfloat16 in an odd number of dimensions, and float16."""
    queries = Ragged(torch.randn(5, 7).to(dtype), (0, 2, 5))
    documents = [document(3, 7, torch.float32, 1), document(4, 7, torch.int8, 2)]
    pairs = pairs_of([(1, 0), (0, 1)])
    joined = Ragged.join([one.decoded(dtype) for one in documents])
    expected = maxsim_reference(queries.decoded(torch.float32), joined.decoded(torch.float32), pairs)
    assert torch.allclose(
        maxsim_apart_avx512(queries, rows_of(documents), pairs), expected, rtol=1e-2, atol=1e-2
    )
