"""Random sequences that are cut into chunks, spread over steps and pooled step by step."""

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.pooling.dispatch import DispatchPooler
from maxsimd.scheduler import Chunk, Sequence, Tokens

CutSequences = tuple[list[Sequence], list[list[Chunk]]]
States = dict[int, torch.Tensor]


def tokens_of(ids: NDArray[np.int32], pooled: set[int] | None) -> Tokens:
    """With the positions that are pooled, or None for all."""
    return Tokens(ids, pooled_positions=None if pooled is None else np.array(sorted(pooled), dtype=np.int64))


@st.composite
def cut_sequences(draw: st.DrawFn, sequence: Callable[[st.DrawFn, int], Sequence]) -> CutSequences:
    """Sequences as `sequence` draws them by their ids, and the chunks of each step."""
    sequences = [sequence(draw, sequence_id) for sequence_id in range(draw(st.integers(1, 6)))]
    steps: list[list[Chunk]] = [[] for _ in range(12)]
    for each in sequences:
        cuts = sorted(draw(st.sets(st.integers(1, len(each)), max_size=4)) | {len(each)})
        step = draw(st.integers(0, 2))
        for start, stop in zip([0, *cuts], cuts, strict=False):
            steps[step].append(Chunk(each, start, stop))
            step += draw(st.integers(1, 2))
    return sequences, [step for step in steps if step]


def random_states(sequences: list[Sequence], hidden: int, seed: int = 0) -> States:
    """The hidden states of each sequence."""
    random = torch.Generator().manual_seed(seed)
    return {each.sequence_id: torch.randn(len(each), hidden, generator=random) for each in sequences}


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
