"""Sparse vectors and the items of hybrid scores against their plain definitions, on random ragged input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.scoring.similarity import score_pairs
from maxsimd.engine.scoring.sparse import sparse_dot, sparse_dot_reference
from maxsimd.pooling import sparse
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.pooling.dispatch import DispatchPooler, pooling_method
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.sparse import WordsHead, dense_of, entries_of
from maxsimd.pooling.token_weights import HybridHead, heaviest_of
from maxsimd.scheduler import Chunk, ResultSlot, Sequence, Tokens
from tests.unit.pooling.cut_sequences import (
    CutSequences,
    cut_sequences,
    pooled_in_steps,
    random_states,
    tokens_of,
)

HIDDEN, WORDS, DIM, TASK = 6, 9, 3, "sparse_embed"
WEIGHT = torch.randn(HIDDEN, WORDS, generator=torch.Generator().manual_seed(0))


class Head(WordsHead):
    """A random matrix; counts the most rows that it was ever given at a time."""

    def __init__(self, most: int | None = None) -> None:
        self.num_words = WORDS
        self.most = most
        self.rows = 0

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.rows = max(self.rows, len(rows))
        return rows @ WEIGHT - 2

    def weights(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.relu().log1p()


def plain(name: str, states: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """The weight of every word, [words]."""
    positions = sequence.tokens.pooled_positions
    weights = (((states if positions is None else states[positions]) @ WEIGHT) - 2).relu().log1p()
    if not len(weights):
        return torch.zeros(WORDS)
    return weights.amax(dim=0) if name == "max" else weights.sum(dim=0)


def a_sequence(draw: st.DrawFn, key: int) -> Sequence:
    """Of a random length, with some pooled tokens or none."""
    length = draw(st.integers(1, 12))
    pooled = draw(st.none() | st.sets(st.integers(0, length - 1)))
    tokens = tokens_of(np.zeros(length, dtype=np.int32), pooled)
    return Sequence.text(key, ResultSlot(0, key), TASK, tokens)


@pytest.mark.parametrize("name", ["max", "sum"])
@settings(max_examples=25)
@given(cut=cut_sequences(a_sequence), rows=st.sampled_from([1, 3, 1000]), seed=st.integers(0, 99))
def test_each_method_equals_its_plain_definition(name: str, cut: CutSequences, rows: int, seed: int) -> None:
    sequences, steps = cut
    states = random_states(sequences, HIDDEN, seed)
    head = Head()
    method = pooling_method(name, head)
    method._most_rows = rows  # type: ignore[attr-defined]
    found = pooled_in_steps(DispatchPooler({TASK: method}), steps, states)
    assert head.rows <= rows
    for sequence in sequences:
        item = found[sequence.sequence_id]
        expected = plain(name, states[sequence.sequence_id], sequence)
        torch.testing.assert_close(dense_of(item, WORDS), expected, atol=1e-5, rtol=1e-5)
        assert (item[:, 1] != 0).all()


def test_word_weights_are_never_there_for_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_PIECE_BYTES", 4 * WORDS * 50)
    head = Head()
    tokens = Tokens(np.zeros(500, dtype=np.int32))
    sequences = [Sequence.text(i, ResultSlot(0, i), TASK, tokens) for i in range(4)]
    cursor = PoolingCursor(tuple(Chunk(each, 0, 500) for each in sequences), (0, 500, 1000, 1500))
    pooling_method("max", head).pool(torch.randn(2000, HIDDEN), cursor)
    assert head.rows == 50


def test_the_heaviest_words_alone_stay_where_there_is_a_limit() -> None:
    weights = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 0.0, 0.5, 0.0]])
    items = entries_of(weights, most=2)
    assert [item.tolist() for item in items] == [[[1.0, 3.0], [3.0, 2.0]], [[2.0, 0.5]]]


@st.composite
def sparse_vectors(draw: st.DrawFn) -> Ragged:
    dense = [
        draw(st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.25, 3.0]), min_size=WORDS, max_size=WORDS))
        for _ in range(draw(st.integers(1, 5)))
    ]
    return entries_of(torch.tensor(dense))


@settings(max_examples=25)
@given(queries=sparse_vectors(), documents=sparse_vectors(), data=st.data())
def test_sparse_scores_equal_dot_products(queries: Ragged, documents: Ragged, data: st.DataObject) -> None:
    pair = st.tuples(st.integers(0, len(queries) - 1), st.integers(0, len(documents) - 1))
    pairs = np.array(data.draw(st.lists(pair, max_size=9)), dtype=np.int64).reshape(-1, 2)
    expected = sparse_dot_reference(queries, documents, pairs, WORDS)
    torch.testing.assert_close(sparse_dot(queries, documents, pairs), expected)

    def no_maxsim(*_: object) -> torch.Tensor:
        raise AssertionError

    torch.testing.assert_close(score_pairs("sparse", queries, documents, pairs, no_maxsim), expected)


WEIGHTLESS = np.array([0, 2])
VECTORS = torch.randn(HIDDEN, DIM, generator=torch.Generator().manual_seed(0))


class Hybrid(HybridHead):
    weightless = WEIGHTLESS

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows @ VECTORS, rows[:, :1].relu()], dim=1)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        return -(rows @ VECTORS)


class Weights(Hybrid):
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :1].relu()


def plain_weights(states: torch.Tensor, ids: list[int]) -> dict[int, float]:
    weights: dict[int, float] = {}
    for token, weight in zip(ids, states[:, 0].relu().tolist(), strict=True):
        if token not in WEIGHTLESS:
            weights[token] = max(weight, weights.get(token, 0.0))
    return weights


@given(
    st.lists(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=10), min_size=1, max_size=4),
    st.lists(st.integers(0, WORDS - 1), min_size=WORDS, max_size=WORDS),
)
def test_tokens_of_one_word_count_by_the_heaviest_of_them(texts: list[list[int]], drawn: list[int]) -> None:
    own = np.arange(WORDS)
    words = np.where(np.isin(own, WEIGHTLESS) | np.isin(drawn, WEIGHTLESS), own, drawn)
    sequences = [
        Sequence.text(key, ResultSlot(0, key), "any", Tokens(np.array(ids, dtype=np.int32)))
        for key, ids in enumerate(texts)
    ]
    weights = torch.rand(sum(map(len, texts)), generator=torch.Generator().manual_seed(0))
    found = heaviest_of(sequences, weights, WEIGHTLESS, words)
    expected: list[tuple[int, float]] = []
    for ids, of_text in zip(texts, weights.split([len(ids) for ids in texts]), strict=True):
        greatest: dict[int, float] = {}
        for token, weight in zip(ids, of_text.tolist(), strict=True):
            if token not in WEIGHTLESS:
                word = int(words[token])
                greatest[word] = max(weight, greatest.get(word, 0.0))
        expected += sorted(greatest.items())
    assert list(zip(found.ids.tolist(), found.weights.tolist(), strict=True)) == expected


def few_words(draw: st.DrawFn, key: int) -> Sequence:
    """Of few different tokens, pooled from the second one on or all."""
    ids = draw(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=10))
    pooled = draw(st.none() | st.just(set(range(1, len(ids)))))
    return Sequence.text(key, ResultSlot(0, key), "any", tokens_of(np.array(ids, dtype=np.int32), pooled))


@settings(max_examples=30)
@given(cut=cut_sequences(few_words), seed=st.integers(0, 99))
def test_items_equal_their_plain_definitions(cut: CutSequences, seed: int) -> None:
    sequences, steps = cut
    states = random_states(sequences, HIDDEN, seed)
    sparse, hybrid = (
        pooled_in_steps(DispatchPooler({"any": pooling_method(name, head)}), steps, states)
        for name, head in (("token-weights", Weights()), ("hybrid", Hybrid()))
    )
    for sequence in sequences:
        key, ids = sequence.sequence_id, sequence.tokens.ids.tolist()
        weights = plain_weights(states[key], ids)
        found = {int(token): weight for token, weight in sparse[key].tolist()}
        assert found == pytest.approx(weights)
        assert list(found) == sorted(found)
        item = hybrid[key]
        assert item[:, DIM].tolist() == ids
        of_rows = [weights.get(token, 0.0) if token not in ids[:i] else 0.0 for i, token in enumerate(ids)]
        assert item[:, -1].tolist() == pytest.approx(of_rows)
        torch.testing.assert_close(item[0, :DIM], -(states[key][0] @ VECTORS))
        torch.testing.assert_close(item[1:, :DIM], states[key][1:] @ VECTORS)
