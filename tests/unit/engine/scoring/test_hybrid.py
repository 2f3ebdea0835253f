"""The items that hybrid scores are made of against their plain definitions on ragged input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.config import EngineConfig
from maxsimd.pooling.dispatch import DispatchPooler, pooling_method
from maxsimd.pooling.token_weights import HybridHead, heaviest_of
from maxsimd.scheduler import ResultSlot, Sequence, Tokens
from tests.unit.pooling.cut_sequences import (
    CutSequences,
    cut_sequences,
    pooled_in_steps,
    random_states,
    tokens_of,
)

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


def a_sequence(draw: st.DrawFn, key: int) -> Sequence:
    """Of few different tokens, pooled from the second one on or all."""
    ids = draw(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=10))
    pooled = draw(st.none() | st.just(set(range(1, len(ids)))))
    return Sequence.text(key, ResultSlot(0, key), "any", tokens_of(np.array(ids, dtype=np.int32), pooled))


@settings(max_examples=30)
@given(cut=cut_sequences(a_sequence), seed=st.integers(0, 99))
def test_items_equal_their_plain_definitions(cut: CutSequences, seed: int) -> None:
    sequences, steps = cut
    states = random_states(sequences, HIDDEN, seed)
    sparse, hybrid = (
        pooled_in_steps(DispatchPooler({"any": pooling_method(name, head)}), steps, states)
        for name, head in (("token-weights", Weights()), ("hybrid", Head()))
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


def test_weights_are_three_numbers() -> None:
    for wrong in ("", "1,2", "1,2,3,4", "a,b,c", "0,0,0", "-1,1,1", "nan,1,1", "inf,1,1"):
        with pytest.raises(ValueError, match="hybrid_weights must be three numbers"):
            EngineConfig(hybrid_weights=wrong)
