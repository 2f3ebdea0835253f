"""Every similarity against its plain definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.scoring.maxsim import maxsim_reference
from maxsimd.engine.scoring.similarity import score_pairs
from maxsimd.pooling.ragged import Ragged
from tests.unit.pairs import pairs_of

pytestmark = pytest.mark.fast


def _dot(q: list[float], d: list[float]) -> float:
    return sum(a * b for a, b in zip(q, d, strict=True))


def _plain(similarity: str, query: torch.Tensor, document: torch.Tensor) -> float:
    q, d = query.tolist(), document.tolist()
    match similarity:
        case "dot":
            return _dot(q[0], d[0])
        case "cosine":
            return _dot(q[0], d[0]) / math.sqrt(_dot(q[0], q[0]) * _dot(d[0], d[0]))
        case _:
            total = sum(max(_dot(a, b) for b in d) for a in q)
            return total / len(q) if similarity == "meanmaxsim" else total


@settings(max_examples=60)
@given(
    st.sampled_from(["maxsim", "meanmaxsim", "cosine", "dot"]),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.data(),
)
def test_a_similarity_follows_its_definition(
    similarity: str, queries: list[int], documents: list[int], data: st.DataObject
) -> None:
    random = torch.Generator().manual_seed(len(queries) * 100 + len(documents))
    if similarity in ("cosine", "dot"):
        queries, documents = [1] * len(queries), [1] * len(documents)
    q = Ragged.from_lengths(3 * torch.randn(sum(queries), 5, generator=random), queries)
    d = Ragged.from_lengths(2 * torch.randn(sum(documents), 5, generator=random), documents)
    index = st.tuples(st.integers(0, len(queries) - 1), st.integers(0, len(documents) - 1))
    pairs = pairs_of(data.draw(st.lists(index, min_size=1, max_size=8)))
    scores = score_pairs(similarity, q, d, pairs, maxsim_reference)
    assert scores.dtype is torch.float32
    assert scores.shape == (len(pairs),)
    assert scores.tolist() == pytest.approx([_plain(similarity, q[i], d[j]) for i, j in pairs], abs=1e-4)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_vectors_of_half_precision_are_multiplied_in_float32(similarity: str) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(2, 64, generator=random).bfloat16()
    q, d = Ragged(values[:1], (0, 1)), Ragged(values[1:], (0, 1))
    [score] = score_pairs(similarity, q, d, pairs_of([(0, 0)]), maxsim_reference).tolist()
    assert score == pytest.approx(_plain(similarity, values[:1].float(), values[1:].float()), abs=1e-5)


@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_a_query_without_tokens_scores_zero(similarity: str) -> None:
    q, d = Ragged(torch.zeros(0, 4), (0, 0)), Ragged(torch.ones(2, 4), (0, 2))
    assert score_pairs(similarity, q, d, pairs_of([(0, 0)]), maxsim_reference).tolist() == [0.0]
