"""Passages of sequences, cut anywhere, have the mean that their plain definition gives."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.pooling.passages import PASSAGES, PassageMeanPool
from maxsimd.scheduler import Chunk, ResultSlot, Sequence, Tokens

HIDDEN = 8
WEIGHT = torch.randn(HIDDEN, 4, generator=torch.Generator().manual_seed(0))


def head(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows @ WEIGHT, dim=-1)


def plain(states: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Passage by passage, as the paper has it."""
    pooled = sequence.tokens.pooled_positions
    rows = states if pooled is None else states[torch.from_numpy(pooled)]
    assert sequence.payload.passages is not None
    return torch.cat([head(rows[start:stop].mean(dim=0)[None]) for start, stop in sequence.payload.passages])


@st.composite
def cut_sequences(draw: st.DrawFn) -> tuple[list[Sequence], list[list[Chunk]]]:
    """Sequences with passages that may overlap, cut at random tokens and spread over steps."""
    sequences = []
    steps: list[list[Chunk]] = [[] for _ in range(16)]
    for key in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 14))
        pooled = draw(st.none() | st.sets(st.integers(0, length - 1), min_size=1))
        positions = None if pooled is None else np.array(sorted(pooled))
        count = length if pooled is None else len(pooled)
        bounds = st.tuples(st.integers(0, count - 1), st.integers(1, count)).filter(
            lambda each: each[0] < each[1]
        )
        passages = np.array(draw(st.lists(bounds, min_size=1, max_size=6)))
        tokens = Tokens(np.zeros(length, dtype=np.int32), pooled_positions=positions)
        sequence = Sequence.passages(key, ResultSlot(0, key), PASSAGES, tokens, passages)
        sequences.append(sequence)
        cuts = sorted(draw(st.sets(st.integers(1, length), max_size=4)) | {length})
        for step, (start, stop) in enumerate(zip([0, *cuts], cuts, strict=False), draw(st.integers(0, 3))):
            steps[step].append(Chunk(sequence, start, stop))
    return sequences, [step for step in steps if step]


@given(cut_sequences(), st.integers(0, 3), st.booleans())
def test_passages_have_the_mean_of_their_rows(
    workload: tuple[list[Sequence], list[list[Chunk]]], padding: int, retried: bool
) -> None:
    sequences, steps = workload
    states = {
        s.sequence_id: torch.randn(len(s), HIDDEN, generator=torch.Generator().manual_seed(s.sequence_id))
        for s in sequences
    }
    method = PassageMeanPool(head)
    items: dict[int, torch.Tensor] = {}
    for step in steps:
        starts: list[int] = []
        rows: list[torch.Tensor] = []
        for chunk in step:
            starts.append(sum(map(len, rows)))
            rows.append(states[chunk.sequence.sequence_id][chunk.start : chunk.stop])
            rows.append(torch.full((padding, HIDDEN), torch.nan))  # whoever looks at padding is found out
        hidden, cursor = torch.cat(rows), PoolingCursor(tuple(step), tuple(starts))
        if retried:
            method.pool(hidden, cursor)
        finished = [chunk.sequence for chunk in step if chunk.is_last]
        for sequence, item in zip(finished, method.pool(hidden, cursor), strict=True):
            items[sequence.sequence_id] = item.clone()
            method.free(sequence.sequence_id)
    assert method.num_states == 0
    for sequence in sequences:
        expected = plain(states[sequence.sequence_id], sequence)
        torch.testing.assert_close(items[sequence.sequence_id], expected, atol=1e-5, rtol=1e-5)
