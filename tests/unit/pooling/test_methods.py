"""Pooling methods against their plain definitions, whole and in chunks, on random ragged input."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.pooling import methods
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.pooling.dispatch import DispatchPooler
from maxsimd.pooling.methods import METHODS
from maxsimd.pooling.passages import PASSAGES, PassageMeanPool
from maxsimd.scheduler import Chunk, ResultSlot, Sequence, Tokens

HIDDEN = 8
WEIGHT = torch.randn(HIDDEN, 4, generator=torch.Generator().manual_seed(0))


def head(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows @ WEIGHT, dim=-1)


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
    "last": lambda states, sequence: head(states[-1:]),
    "mean": lambda states, sequence: head(_pooled(states, sequence).mean(dim=0, keepdim=True)),
    "weighted-mean": lambda states, sequence: head(_weighted_mean(states, sequence)),
}


def _passages(states: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Passage by passage, as the paper has it."""
    rows = _pooled(states, sequence)
    assert sequence.payload.passages is not None
    return torch.cat([head(rows[start:stop].mean(dim=0)[None]) for start, stop in sequence.payload.passages])


PLAIN[PASSAGES] = _passages


@st.composite
def cut_sequences(draw: st.DrawFn) -> tuple[list[Sequence], list[list[Chunk]]]:
    """Sequences of random lengths, pooled tokens and passages, cut at random places and spread over steps."""
    sequences = []
    steps: list[list[Chunk]] = []
    for key in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 14))
        pooled = draw(st.none() | st.sets(st.integers(0, length - 1), min_size=1))
        positions = None if pooled is None else np.array(sorted(pooled))
        tokens = Tokens(np.zeros(length, dtype=np.int32), pooled_positions=positions)
        task, slot = draw(st.sampled_from(sorted(PLAIN))), ResultSlot(0, key)
        if task == PASSAGES:
            count = length if pooled is None else len(pooled)
            bounds = st.tuples(st.integers(0, count - 1), st.integers(1, count))
            # They may overlap.
            passages = draw(st.lists(bounds.filter(lambda each: each[0] < each[1]), min_size=1, max_size=6))
            sequence = Sequence.passages(key, slot, PASSAGES, tokens, np.array(passages))
        else:
            sequence = Sequence.text(key, slot, task, tokens)
        sequences.append(sequence)
        cuts = sorted(draw(st.sets(st.integers(1, length), max_size=4)) | {length})
        step = draw(st.integers(0, 2))
        for start, stop in zip([0, *cuts], cuts, strict=False):
            while len(steps) <= step:
                steps.append([])
            steps[step].append(Chunk(sequence, start, stop))
            step += draw(st.integers(1, 2))
    return sequences, [step for step in steps if step]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that these few rows are more than one."""
    monkeypatch.setattr(methods, "TILE", 3)


@settings(max_examples=80)
@given(cut_sequences(), st.integers(0, 3), st.booleans())
def test_pooling_in_chunks_equals_the_plain_definition(
    workload: tuple[list[Sequence], list[list[Chunk]]], padding: int, retried: bool
) -> None:
    sequences, steps = workload
    states = {
        s.sequence_id: torch.randn(len(s), HIDDEN, generator=torch.Generator().manual_seed(s.sequence_id))
        for s in sequences
    }
    poolers = METHODS | {PASSAGES: PassageMeanPool}
    pooler = DispatchPooler({name: pool(head) for name, pool in poolers.items()})
    items: dict[int, torch.Tensor] = {}
    for step in steps:
        starts, rows = [], []
        for chunk in step:
            starts.append(sum(map(len, rows)))
            rows.append(states[chunk.sequence.sequence_id][chunk.start : chunk.stop])
            rows.append(torch.full((padding, HIDDEN), torch.nan))  # whoever looks at padding is found out
        hidden, cursor = torch.cat(rows), PoolingCursor(tuple(step), tuple(starts))
        if retried:
            pooler.pool(hidden, cursor)
        for pooled in pooler.pool(hidden, cursor):
            for sequence, item in pooled:
                assert sequence.sequence_id not in items
                items[sequence.sequence_id] = item.clone()
                pooler.free(sequence.sequence_id)
    assert pooler.num_states == 0
    for sequence in sequences:
        expected = PLAIN[sequence.payload.task](states[sequence.sequence_id], sequence)
        torch.testing.assert_close(items[sequence.sequence_id], expected, atol=1e-5, rtol=1e-5)
