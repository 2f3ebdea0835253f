"""Every MaxSim backend against the reference, and the reference against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.util import maxsim as sentence_transformers_maxsim

from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.scoring.maxsim import choose_maxsim, maxsim_reference, maxsim_tiled, tiled
from maxsimd.engine.scoring.similarity import score_pairs
from maxsimd.pooling.ragged import Ragged
from tests.unit.pairs import Pairs, pairs_of


def random_ragged(lengths: list[int], dim: int, seed: int) -> Ragged:
    values = torch.randn(sum(lengths), dim, generator=torch.Generator().manual_seed(seed))
    return Ragged.from_lengths(torch.nn.functional.normalize(values, dim=-1), lengths)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Ragged, Ragged, Pairs]:
    dim = draw(st.sampled_from([1, 3, 16, 48]))
    queries = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    documents = draw(st.lists(st.integers(0, 70), min_size=1, max_size=8))
    index = st.tuples(st.integers(0, len(queries) - 1), st.integers(0, len(documents) - 1))
    pairs = draw(st.lists(index, max_size=20))
    return random_ragged(queries, dim, 1), random_ragged(documents, dim, 2), pairs_of(pairs)


@given(problems())
def test_the_cpu_backend_equals_the_reference(problem: tuple[Ragged, Ragged, Pairs]) -> None:
    torch.testing.assert_close(maxsim_tiled(*problem), maxsim_reference(*problem), atol=1e-5, rtol=1e-5)


def test_the_reference_equals_sentence_transformers() -> None:
    queries, documents = random_ragged([5, 32, 1], 16, 1), random_ragged([9, 1, 40, 17], 16, 2)
    pairs = pairs_of([(q, d) for q in range(3) for d in range(4)])
    expected = sentence_transformers_maxsim(list(queries), list(documents)).flatten()
    torch.testing.assert_close(maxsim_reference(queries, documents, pairs), expected)


def test_a_document_without_tokens_ranks_below_all_others() -> None:
    queries, documents = random_ragged([4], 8, 1), random_ragged([0, 3], 8, 2)
    empty, other = maxsim_tiled(queries, documents, pairs_of([(0, 0), (0, 1)])).tolist()
    assert empty < -1e8 < other


def test_auto_is_the_best_that_runs_on_a_cpu_and_triton_is_refused_there() -> None:
    cpu_device = torch.device("cpu")
    assert choose_maxsim("auto", cpu_device)[0] == ("avx512" if kernels.is_available() else "tiled")
    assert choose_maxsim("auto", cpu_device, compiled_allowed=False)[0] == "tiled"
    assert choose_maxsim("reference", cpu_device)[0] == "reference"
    with pytest.raises(ValueError, match="cannot run on this cpu"):
        choose_maxsim("triton", cpu_device)


def test_a_backend_that_was_not_built_is_refused_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_available", lambda: False)
    assert choose_maxsim("auto", torch.device("cpu"))[0] == "tiled"
    with pytest.raises(ValueError, match="'avx512' cannot run"):
        choose_maxsim("avx512", torch.device("cpu"))


@pytest.mark.parametrize("similarity", ["cosine", "dot", "meanmaxsim"])
def test_other_similarities_follow_their_definition(similarity: str) -> None:
    length = 3 if similarity == "meanmaxsim" else 1
    queries = Ragged.from_lengths(torch.randn(2 * length, 8), [length] * 2)
    documents = Ragged.from_lengths(torch.randn(3 * length, 8), [length] * 3)
    pairs = pairs_of([(0, 2), (1, 0), (1, 1)])
    scores = score_pairs(similarity, queries, documents, pairs, maxsim_reference)
    for score, (q, d) in zip(scores, pairs, strict=True):
        if similarity == "cosine":
            expected = torch.cosine_similarity(queries[q], documents[d])[0]
        elif similarity == "dot":
            expected = queries[q][0] @ documents[d][0]
        else:
            expected = (queries[q] @ documents[d].T).amax(1).mean()
        torch.testing.assert_close(score, expected)


@given(problems())
def test_bfloat16_products_are_close_to_the_reference(
    problem: tuple[Ragged, Ragged, Pairs],
) -> None:
    queries, documents, pairs = problem
    rounded = Ragged(documents.values.bfloat16(), documents.offsets)
    scores, exact = maxsim_tiled(queries, rounded, pairs), maxsim_reference(queries, documents, pairs)
    torch.testing.assert_close(scores, exact, atol=2e-2, rtol=1e-2)


@given(st.integers(1, 10_000), st.integers(1, 70))
@settings(max_examples=50)
def test_a_product_in_pieces_is_the_product(rows: int, columns: int) -> None:
    values = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)).bfloat16()
    query = torch.randn(8, columns, generator=torch.Generator().manual_seed(columns)).bfloat16()
    torch.testing.assert_close(tiled._product(values, query), values @ query, atol=0.1, rtol=0.02)
