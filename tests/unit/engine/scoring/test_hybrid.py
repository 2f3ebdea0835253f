"""Hybrid scores, and the items that they are made of, against their plain definitions on ragged input."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.config import EngineConfig
from maxsimd.engine.scoring.hybrid import Hybrid
from maxsimd.engine.scoring.maxsim import maxsim_reference
from maxsimd.engine.scoring.similarity import score_pairs
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.pooling.dispatch import pooling_method
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.token_weights import HybridHead, heaviest_of
from maxsimd.scheduler import Chunk, ResultSlot, Sequence, Tokens

HIDDEN, DIM, WORDS = 6, 3, 9
WEIGHTLESS = np.array([0, 2])
VECTORS = torch.randn(HIDDEN, DIM, generator=torch.Generator().manual_seed(0))


class Head(HybridHead):
    weightless = WEIGHTLESS

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows @ VECTORS, rows[:, :1].relu()], dim=1)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        return -(rows @ VECTORS)


class Weights(Head):
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


@st.composite
def cut_sequences(draw: st.DrawFn) -> tuple[list[Sequence], list[list[Chunk]]]:
    """Sequences of few different tokens, cut anywhere and spread over steps."""
    sequences: list[Sequence] = []
    steps: list[list[Chunk]] = []
    for key in range(draw(st.integers(1, 5))):
        ids = draw(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=10))
        pooled = draw(st.none() | st.just(np.arange(1, len(ids))))
        tokens = Tokens(np.array(ids, dtype=np.int32), pooled_positions=pooled)
        sequences.append(Sequence.text(key, ResultSlot(0, key), "any", tokens))
        cuts = sorted(draw(st.sets(st.integers(1, len(ids)), max_size=2)) - {len(ids)})
        for i, (start, stop) in enumerate(pairwise([0, *cuts, len(ids)])):
            while len(steps) <= i:
                steps.append([])
            steps[i].append(Chunk(sequences[-1], start, stop))
    return sequences, steps


def pooled(name: str, steps: list[list[Chunk]], states: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    method = pooling_method(name, Weights() if name == "token-weights" else Head())
    found = {}
    for step in steps:
        hidden = torch.cat([states[c.sequence.sequence_id][c.start : c.stop] for c in step])
        starts = np.cumsum([0, *(len(chunk) for chunk in step[:-1])])
        cursor = PoolingCursor(tuple(step), tuple(starts.tolist()))
        for _ in range(2):  # a step may be run again
            items = method.pool(hidden, cursor)
        finished = [chunk.sequence for chunk in step if chunk.is_last]
        found |= {each.sequence_id: item for each, item in zip(finished, items, strict=True)}
    for key in states:
        method.free(key)
    assert method.num_states == 0
    return found


@settings(max_examples=30)
@given(cut=cut_sequences(), seed=st.integers(0, 99))
def test_items_equal_their_plain_definitions(
    cut: tuple[list[Sequence], list[list[Chunk]]], seed: int
) -> None:
    sequences, steps = cut
    random = torch.Generator().manual_seed(seed)
    states = {each.sequence_id: torch.randn(len(each), HIDDEN, generator=random) for each in sequences}
    sparse, hybrid = pooled("token-weights", steps, states), pooled("hybrid", steps, states)
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


@settings(max_examples=30)
@given(cut=cut_sequences(), seed=st.integers(0, 99))
def test_scores_equal_their_plain_definitions(
    cut: tuple[list[Sequence], list[list[Chunk]]], seed: int
) -> None:
    sequences, steps = cut
    random = torch.Generator().manual_seed(seed)
    states = {each.sequence_id: torch.randn(len(each), HIDDEN, generator=random) for each in sequences}
    items = pooled("hybrid", steps, states)
    ragged = Ragged.from_items([items[each.sequence_id] for each in sequences])
    pairs = np.array([(i, j) for i in range(len(sequences)) for j in range(len(sequences))])
    hybrid = Hybrid((0.5, 1.0, 2.5), maxsim_reference)
    dense, sparse, tokens = hybrid.parts(ragged, ragged, pairs)
    for k, (i, j) in enumerate(pairs.tolist()):
        q, d = states[i], states[j]
        of_query = plain_weights(q, sequences[i].tokens.ids.tolist())
        of_document = plain_weights(d, sequences[j].tokens.ids.tolist())
        assert float(dense[k]) == pytest.approx(
            float((q[0] @ VECTORS) @ (d[0] @ VECTORS)), rel=1e-4, abs=1e-4
        )
        shared = sum(weight * of_document.get(token, 0.0) for token, weight in of_query.items())
        assert float(sparse[k]) == pytest.approx(shared, rel=1e-4, abs=1e-4)
        if len(q) > 1 and len(d) > 1:
            best = ((q[1:] @ VECTORS) @ (d[1:] @ VECTORS).T).amax(dim=1).mean()
            assert float(tokens[k]) == pytest.approx(float(best), rel=1e-4, abs=1e-4)
    expected = (0.5 * dense + sparse + 2.5 * tokens) / 4
    torch.testing.assert_close(score_pairs("hybrid", ragged, ragged, pairs, hybrid), expected)


@pytest.mark.parametrize("wrong", ["", "1,2", "1,2,3,4", "a,b,c", "0,0,0", "-1,1,1", "nan,1,1", "inf,1,1"])
def test_weights_are_three_numbers(wrong: str) -> None:
    with pytest.raises(ValueError, match="hybrid_weights must be three numbers"):
        EngineConfig(hybrid_weights=wrong)
