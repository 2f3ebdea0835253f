"""Pooling methods, sparse vectors and hybrid items against plain definitions, whole and in chunks."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.scoring.similarity import score_pairs
from maxsimd.pooling import methods, sparse
from maxsimd.pooling.dispatch import DispatchPooler, pooling_method
from maxsimd.pooling.methods import PASSAGES, PassageMeanPool, PoolingCursor
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.sparse import HybridHead, WordsHead, dense_of, entries_of, heaviest_of
from maxsimd.scheduler import Chunk, ResultSlot, Tokens, TokenSequence

HIDDEN, WORDS, DIM = 8, 9, 4
WEIGHT = torch.randn(HIDDEN, DIM, generator=torch.Generator().manual_seed(0))
TO_WORDS = torch.randn(HIDDEN, WORDS, generator=torch.Generator().manual_seed(0))
WEIGHTLESS = np.array([0, 2])
CutSequences = tuple[list[TokenSequence], list[list[Chunk]]]
States = dict[int, torch.Tensor]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "TILE", 3)


@st.composite
def cut_sequences(draw: st.DrawFn, task: st.SearchStrategy[str], may_be_none: bool = False) -> CutSequences:
    sequences = [_a_sequence(draw, key, draw(task), may_be_none) for key in range(draw(st.integers(1, 6)))]
    steps: list[list[Chunk]] = [[] for _ in range(12)]
    for each in sequences:
        cuts = sorted(draw(st.sets(st.integers(1, len(each)), max_size=4)) | {len(each)})
        step = draw(st.integers(0, 2))
        for start, stop in zip([0, *cuts], cuts, strict=False):
            steps[step].append(Chunk(each, start, stop))
            step += draw(st.integers(1, 2))
    return sequences, [step for step in steps if step]


def _a_sequence(draw: st.DrawFn, key: int, task: str, may_be_none: bool) -> TokenSequence:
    """A sequence of a random length and few different tokens, some of them pooled. Passages may overlap."""
    ids = draw(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=14))
    length, slot = len(ids), ResultSlot(0, key)
    pooled = draw(st.none() | st.sets(st.integers(0, length - 1), min_size=0 if may_be_none else 1))
    if task == "any":
        pooled = draw(st.none() | st.just(set(range(1, length))))
    positions = None if pooled is None else np.array(sorted(pooled), dtype=np.int64)
    tokens = Tokens(np.array(ids, dtype=np.int32), pooled_positions=positions)
    if task != PASSAGES:
        return TokenSequence.text(key, slot, task, tokens)
    count = length if pooled is None else len(pooled)
    bounds = st.tuples(st.integers(0, count - 1), st.integers(1, count))
    passages = draw(st.lists(bounds.filter(lambda each: each[0] < each[1]), min_size=1, max_size=6))
    return TokenSequence.passages(key, slot, PASSAGES, tokens, np.array(passages))


def random_states(sequences: list[TokenSequence], seed: int = 0) -> States:
    random = torch.Generator().manual_seed(seed)
    return {each.sequence_id: torch.randn(len(each), HIDDEN, generator=random) for each in sequences}


def pooled_in_steps(
    pooler: DispatchPooler, steps: list[list[Chunk]], states: States, padding: int = 0, retried: bool = True
) -> States:
    """The item of each sequence. A step may be run again; rows of padding are no numbers."""
    found: States = {}
    for step in steps:
        starts, rows = [], []
        for chunk in step:
            starts.append(sum(map(len, rows)))
            rows.append(states[chunk.sequence.sequence_id][chunk.start : chunk.stop])
            rows.append(torch.full((padding, rows[-1].shape[1]), torch.nan))
        hidden, cursor = torch.cat(rows), PoolingCursor(tuple(step), tuple(starts))
        if retried:
            pooler.pool(hidden, cursor)
        for pooled in pooler.pool(hidden, cursor):
            for sequence, item in pooled:
                assert sequence.sequence_id not in found
                found[sequence.sequence_id] = item.clone()
                pooler.free(sequence.sequence_id)
    assert pooler.num_states == 0
    return found


def head(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows @ WEIGHT, dim=-1)


def wide_head(rows: torch.Tensor) -> torch.Tensor:
    return head(rows[:, :HIDDEN] - rows[:, HIDDEN:])


def _pooled(states: torch.Tensor, sequence: TokenSequence) -> torch.Tensor:
    positions = sequence.tokens.pooled_positions
    return states if positions is None else states[torch.from_numpy(positions)]


def _weighted_mean(states: torch.Tensor, sequence: TokenSequence) -> torch.Tensor:
    weights = _pooled(torch.arange(1.0, len(states) + 1)[:, None], sequence)
    return (_pooled(states, sequence) * weights).sum(dim=0, keepdim=True) / weights.sum()


def _passages(states: torch.Tensor, sequence: TokenSequence) -> torch.Tensor:
    rows = _pooled(states, sequence)
    assert sequence.payload.passages is not None
    return torch.cat([head(rows[start:stop].mean(dim=0)[None]) for start, stop in sequence.payload.passages])


PLAIN: dict[str, Callable[[torch.Tensor, TokenSequence], torch.Tensor]] = {
    "all": lambda states, sequence: head(_pooled(states, sequence)),
    "cls": lambda states, sequence: head(states[:1]),
    "last": lambda states, sequence: head(_pooled(states, sequence)[-1:]),
    "mean": lambda states, sequence: head(_pooled(states, sequence).mean(dim=0, keepdim=True)),
    "weighted-mean": lambda states, sequence: head(_weighted_mean(states, sequence)),
    "cls-after-prompt": lambda states, sequence: head(_pooled(states, sequence)[:1]),
    "max-pooling": lambda states, sequence: head(_pooled(states, sequence).amax(dim=0, keepdim=True)),
    "mean-sqrt-len": lambda states, sequence: head(
        _pooled(states, sequence).sum(dim=0, keepdim=True) / len(_pooled(states, sequence)) ** 0.5
    ),
    "max-pooling+cls": lambda states, sequence: wide_head(
        torch.cat([_pooled(states, sequence).amax(dim=0, keepdim=True), states[:1]], dim=1)
    ),
    PASSAGES: _passages,
}


@settings(max_examples=40)
@given(cut_sequences(st.sampled_from(sorted(PLAIN))), st.integers(0, 3), st.booleans())
def test_pooling_in_chunks_equals_its_definition(workload: CutSequences, padding: int, retried: bool) -> None:
    sequences, steps = workload
    states = random_states(sequences)
    made = {key: pooling_method(key, wide_head if "+" in key else head) for key in PLAIN.keys() - {PASSAGES}}
    pooler = DispatchPooler({**made, PASSAGES: PassageMeanPool(head)})
    items = pooled_in_steps(pooler, steps, states, padding, retried)
    for sequence in sequences:
        expected = PLAIN[sequence.payload.task](states[sequence.sequence_id], sequence)
        torch.testing.assert_close(items[sequence.sequence_id], expected, atol=1e-5, rtol=1e-5)


class Words(WordsHead):
    """A random matrix; counts the most rows that it was ever given at a time."""

    num_words, most, rows = WORDS, None, 0

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.rows = max(self.rows, len(rows))
        return rows @ TO_WORDS - 2

    def weights(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.relu().log1p()


@pytest.mark.parametrize("name", ["max-words", "sum-words"])
@settings(max_examples=25)
@given(cut=cut_sequences(st.just("embed"), True), rows=st.sampled_from([1, 3, 1000]), seed=st.integers(0, 99))
def test_each_sparse_method_equals_its_definition(name: str, cut: CutSequences, rows: int, seed: int) -> None:
    sequences, steps = cut
    states, words = random_states(sequences, seed), Words()
    method = pooling_method(name, words)
    method._most_rows = rows  # type: ignore[attr-defined]
    found = pooled_in_steps(DispatchPooler({"embed": method}), steps, states)
    assert words.rows <= rows
    for sequence in sequences:
        weights = (_pooled(states[sequence.sequence_id], sequence) @ TO_WORDS - 2).relu().log1p()
        weights = torch.cat([weights, torch.zeros(1, WORDS)])  # of no tokens, nothing weighs anything
        expected = weights.amax(dim=0) if name == "max-words" else weights.sum(dim=0)
        item = found[sequence.sequence_id]
        torch.testing.assert_close(dense_of(item, WORDS), expected, atol=1e-5, rtol=1e-5)
        assert (item[:, 1] != 0).all()


def test_words_are_weighed_in_pieces_and_the_heaviest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_PIECE_BYTES", 4 * WORDS * 50)
    tokens, words = Tokens(np.zeros(500, dtype=np.int32)), Words()
    sequences = [TokenSequence.text(i, ResultSlot(0, i), "embed", tokens) for i in range(4)]
    cursor = PoolingCursor(tuple(Chunk(each, 0, 500) for each in sequences), (0, 500, 1000, 1500))
    pooling_method("max-words", words).pool(torch.randn(2000, HIDDEN), cursor)
    assert words.rows == 50
    items = entries_of(torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 0.0, 0.5, 0.0]]), most=2)
    assert [item.tolist() for item in items] == [[[1.0, 3.0], [3.0, 2.0]], [[2.0, 0.5]]]


@st.composite
def sparse_vectors(draw: st.DrawFn) -> Ragged:
    some = [0.0, 0.0, 0.5, 1.25, 3.0, *draw(st.sampled_from([(), (torch.nan,)]))]
    weights = st.lists(st.sampled_from(some), min_size=WORDS, max_size=WORDS)
    return entries_of(torch.tensor(draw(st.lists(weights, min_size=1, max_size=5))))


@settings(max_examples=25)
@given(queries=sparse_vectors(), documents=sparse_vectors(), data=st.data())
def test_sparse_scores_equal_dot_products(queries: Ragged, documents: Ragged, data: st.DataObject) -> None:
    pair = st.tuples(st.integers(0, len(queries) - 1), st.integers(0, len(documents) - 1))
    pairs = np.array(data.draw(st.lists(pair, max_size=9)), dtype=np.int64).reshape(-1, 2)
    dense = [[dense_of(item, WORDS).double() for item in items] for items in (queries, documents)]
    expected = torch.tensor([float(dense[0][q] @ dense[1][d]) for q, d in pairs.tolist()])
    found = score_pairs("sparse", queries, documents, pairs, None)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, equal_nan=True)


class Hybrid(HybridHead):
    weightless = WEIGHTLESS

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows @ WEIGHT, rows[:, :1].relu()], dim=1)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        return -(rows @ WEIGHT)


class Weights(Hybrid):
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :1].relu()


def heaviest(ids: list[int], weights: list[float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, weight in zip(ids, weights, strict=True):
        if token not in WEIGHTLESS:
            found[token] = max(weight, found.get(token, 0.0))
    return found


@given(
    st.lists(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=10), min_size=1, max_size=4),
    st.lists(st.integers(0, WORDS - 1), min_size=WORDS, max_size=WORDS),
)
def test_tokens_of_one_word_count_by_the_heaviest_of_them(texts: list[list[int]], drawn: list[int]) -> None:
    own = np.arange(WORDS)
    words = np.where(np.isin(own, WEIGHTLESS) | np.isin(drawn, WEIGHTLESS), own, drawn)
    sequences = [
        TokenSequence.text(key, ResultSlot(0, key), "any", Tokens(np.array(ids, dtype=np.int32)))
        for key, ids in enumerate(texts)
    ]
    weights = torch.rand(sum(map(len, texts)), generator=torch.Generator().manual_seed(0))
    found = heaviest_of(sequences, weights, WEIGHTLESS, words)
    expected: list[tuple[int, float]] = []
    for ids, of_text in zip(texts, weights.split([len(ids) for ids in texts]), strict=True):
        expected += sorted(heaviest(words[ids].tolist(), of_text.tolist()).items())
    assert list(zip(found.ids.tolist(), found.weights.tolist(), strict=True)) == expected


@settings(max_examples=30)
@given(cut=cut_sequences(st.just("any")), seed=st.integers(0, 99))
def test_items_equal_their_plain_definitions(cut: CutSequences, seed: int) -> None:
    sequences, steps = cut
    states = random_states(sequences, seed)
    sparse, hybrid = (
        pooled_in_steps(DispatchPooler({"any": pooling_method(name, head)}), steps, states)
        for name, head in (("token-weights", Weights()), ("hybrid", Hybrid()))
    )
    for sequence in sequences:
        key, ids = sequence.sequence_id, sequence.tokens.ids.tolist()
        weights = heaviest(ids, states[key][:, 0].relu().tolist())
        found = {int(token): weight for token, weight in sparse[key].tolist()}
        assert (found, list(found)) == (pytest.approx(weights), sorted(found))
        item = hybrid[key]
        assert item[:, DIM].tolist() == ids
        of_rows = [weights.get(token, 0.0) if token not in ids[:i] else 0.0 for i, token in enumerate(ids)]
        assert item[:, -1].tolist() == pytest.approx(of_rows)
        torch.testing.assert_close(item[0, :DIM], -(states[key][0] @ WEIGHT))
        torch.testing.assert_close(item[1:, :DIM], states[key][1:] @ WEIGHT)
