"""Pooling methods against their plain definitions, whole and in chunks, on random ragged input."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.engine.scoring.query_store import QueryStore
from maxsimd.pooling import methods
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.pooling.dispatch import DispatchPooler
from maxsimd.pooling.methods import METHODS
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


@st.composite
def cut_sequences(draw: st.DrawFn) -> tuple[list[Sequence], list[list[Chunk]]]:
    """Sequences of random lengths and pooled tokens, cut at random places and spread over steps."""
    sequences = []
    steps: list[list[Chunk]] = []
    for key in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 12))
        pooled = draw(st.none() | st.sets(st.integers(0, length - 1), min_size=1))
        positions = None if pooled is None else np.array(sorted(pooled))
        tokens = Tokens(np.zeros(length, dtype=np.int32), pooled_positions=positions)
        task = draw(st.sampled_from(sorted(METHODS)))
        sequence = Sequence.text(key, ResultSlot(0, key), task, tokens)
        sequences.append(sequence)
        cuts = sorted(draw(st.sets(st.integers(1, length), max_size=3)) | {length})
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


@given(cut_sequences(), st.integers(0, 3), st.booleans())
def test_pooling_in_chunks_equals_the_plain_definition(
    workload: tuple[list[Sequence], list[list[Chunk]]], padding: int, retried: bool
) -> None:
    sequences, steps = workload
    states = {
        s.sequence_id: torch.randn(len(s), HIDDEN, generator=torch.Generator().manual_seed(s.sequence_id))
        for s in sequences
    }
    pooler = DispatchPooler({name: method(head) for name, method in METHODS.items()})
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


@pytest.mark.parametrize("task", ["all", "cls", "mean", "weighted-mean"])
def test_state_of_an_unfinished_sequence_goes_when_it_is_freed(task: str) -> None:
    pooler = DispatchPooler({task: METHODS[task](head)})
    sequence = Sequence.text(5, ResultSlot(0, 0), task, Tokens(np.zeros(6, dtype=np.int32)))
    pooled = pooler.pool(torch.randn(3, HIDDEN), PoolingCursor((Chunk(sequence, 0, 3),), (0,)))
    assert pooled == []
    assert pooler.num_states == 1
    pooler.free(5)
    assert pooler.num_states == 0


def _query(key: int, num_consumers: int, request: int = 0) -> Sequence:
    return Sequence.query(key, request, "all", Tokens(np.zeros(2, dtype=np.int32)), num_consumers)


def test_a_query_is_held_until_its_last_use() -> None:
    store = QueryStore()
    store.put(_query(1, num_consumers=3), torch.ones(2, 4))
    store.release(1, consumers=2)
    assert store.get(1).shape == (2, 4)
    store.release(1)
    with pytest.raises(KeyError):
        store.get(1)


def test_queries_of_a_request_that_ended_are_dropped() -> None:
    store = QueryStore()
    store.put(_query(1, num_consumers=9, request=1), torch.ones(2, 4))
    store.put(_query(2, num_consumers=9, request=2), torch.ones(2, 4))
    store.drop_request(1)
    assert len(store) == 1
