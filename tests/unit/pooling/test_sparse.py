"""Sparse vectors against their plain definitions, whole and in chunks, on random ragged input."""

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
from maxsimd.pooling.sparse import GivenWords, WordsHead, dense_of, entries_of
from maxsimd.scheduler import Chunk, ResultSlot, Role, Sequence, Tokens
from tests.unit.pooling.cut_sequences import (
    CutSequences,
    cut_sequences,
    pooled_in_steps,
    random_states,
    tokens_of,
)

HIDDEN, WORDS, TASK = 6, 23, "sparse_embed"
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


def test_queries_are_looked_up_and_documents_read() -> None:
    head = Head()
    head.static_roles, head.static_weights = frozenset({Role.QUERY}), torch.arange(WORDS).float()
    method = pooling_method("max", head)
    ids = np.array([5, 0, 7, 5, 9], dtype=np.int32)
    tokens = Tokens(ids, pooled_positions=np.array([1, 2, 3]))
    slot = ResultSlot(0, 0)
    query = Sequence.text(0, slot, TASK, tokens, Role.QUERY)
    document = Sequence.text(1, slot, TASK, tokens, Role.DOCUMENT)
    hidden = torch.randn(15, HIDDEN, generator=torch.Generator().manual_seed(1))
    chunks = tuple(Chunk(each, 0, 5) for each in (document, query, document))
    items = method.pool(hidden, PoolingCursor(chunks, (0, 5, 10)))
    assert items[1].tolist() == [[5.0, 5.0], [7.0, 7.0]]  # a word that weighs nothing is left out
    torch.testing.assert_close(dense_of(items[0], WORDS), plain("max", hidden[:5], document))
    torch.testing.assert_close(dense_of(items[2], WORDS), plain("max", hidden[10:], document))


def test_rows_that_are_weights_already_are_taken_as_they_are() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.5], [1.0, 0.0, 0.0]])
    head = Head(most=1)
    method = pooling_method("given", GivenWords(head))
    tokens = Tokens(np.zeros(4, dtype=np.int32))
    sequences = [Sequence.text(i, ResultSlot(0, i), TASK, tokens) for i in range(2)]
    cursor = PoolingCursor(tuple(Chunk(each, 0, 4) for each in sequences), (0, 1))
    assert [item.tolist() for item in method.pool(weights, cursor)] == [[[1.0, 2.0]], [[0.0, 1.0]]]


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
