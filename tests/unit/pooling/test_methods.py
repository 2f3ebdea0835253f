"""Pooling methods against their plain definitions, whole and in chunks, on random ragged input."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.pooling import methods
from maxsimd.pooling.dispatch import DispatchPooler, pooling_method
from maxsimd.pooling.passages import PASSAGES, PassageMeanPool
from maxsimd.scheduler import ResultSlot, Sequence
from tests.unit.pooling.cut_sequences import (
    CutSequences,
    cut_sequences,
    pooled_in_steps,
    random_states,
    tokens_of,
)

HIDDEN = 8
WEIGHT = torch.randn(HIDDEN, 4, generator=torch.Generator().manual_seed(0))


def head(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows @ WEIGHT, dim=-1)


def wide_head(rows: torch.Tensor) -> torch.Tensor:
    return head(rows[:, :HIDDEN] - rows[:, HIDDEN:])


def _pooled(states: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    return (
        states
        if sequence.tokens.pooled_positions is None
        else states[torch.from_numpy(sequence.tokens.pooled_positions)]
    )


def _weighted_mean(states: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    weights = _pooled(torch.arange(1.0, len(states) + 1)[:, None], sequence)
    return (_pooled(states, sequence) * weights).sum(dim=0, keepdim=True) / weights.sum()


PLAIN: dict[str, Callable[[torch.Tensor, Sequence], torch.Tensor]] = {
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
}


def _passages(states: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Passage by passage, as the paper has it."""
    rows = _pooled(states, sequence)
    assert sequence.payload.passages is not None
    return torch.cat([head(rows[start:stop].mean(dim=0)[None]) for start, stop in sequence.payload.passages])


PLAIN[PASSAGES] = _passages


def a_sequence(draw: st.DrawFn, key: int) -> Sequence:
    """Of a random length, with some pooled tokens, for a random method. Passages may overlap."""
    length = draw(st.integers(1, 14))
    pooled = draw(st.none() | st.sets(st.integers(0, length - 1), min_size=1))
    tokens = tokens_of(np.zeros(length, dtype=np.int32), pooled)
    task, slot = draw(st.sampled_from(sorted(PLAIN))), ResultSlot(0, key)
    if task != PASSAGES:
        return Sequence.text(key, slot, task, tokens)
    count = length if pooled is None else len(pooled)
    bounds = st.tuples(st.integers(0, count - 1), st.integers(1, count))
    passages = draw(st.lists(bounds.filter(lambda each: each[0] < each[1]), min_size=1, max_size=6))
    return Sequence.passages(key, slot, PASSAGES, tokens, np.array(passages))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that these few rows are more than one."""
    monkeypatch.setattr(methods, "TILE", 3)


@settings(max_examples=40)
@given(cut_sequences(a_sequence), st.integers(0, 3), st.booleans())
def test_pooling_in_chunks_equals_its_definition(workload: CutSequences, padding: int, retried: bool) -> None:
    sequences, steps = workload
    states = random_states(sequences, HIDDEN)
    made = {
        name: pooling_method(name, wide_head if "+" in name else head) for name in PLAIN.keys() - {PASSAGES}
    }
    pooler = DispatchPooler({**made, PASSAGES: PassageMeanPool(head)})
    items = pooled_in_steps(pooler, steps, states, padding, retried)
    for sequence in sequences:
        expected = PLAIN[sequence.payload.task](states[sequence.sequence_id], sequence)
        torch.testing.assert_close(items[sequence.sequence_id], expected, atol=1e-5, rtol=1e-5)
