"""Late chunking: a text is read as a whole and then pooled passage by passage, so that the vector of each
passage has seen what stands around it.

Source: Günther, Mohr, Williams, Wang & Xiao 2024, "Late Chunking: Contextual Chunk Embeddings Using
Long-Context Embedding Models" (arXiv 2409.04701).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.cursor import PoolingCursor, take_rows
from maxsimd.pooling.methods import TILE, Head, PoolingMethod
from maxsimd.pooling.ragged import Ragged, offsets_of
from maxsimd.pooling.transfer import to_device
from maxsimd.scheduler import Chunk

# The task whose items are one vector a passage, of models that pool a whole text by its mean.
PASSAGES = "embed_passages"

# Of a sequence that is cut, what its earlier tokens add up to: passages, and their sums [passages, hidden].
_Partial = tuple[NDArray[np.int64], torch.Tensor]


class PassageMeanPool(PoolingMethod):
    """The mean of each passage's rows, summed in float32: [passages, dim] a sequence, in the order of its
    payload's `passages`.

    Between chunks it has the running sums of each, by the token at which the chunk began."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._sums: dict[int, dict[int, _Partial]] = {}

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        rows, lengths = cursor.pooled_rows()
        firsts = offsets_of(lengths)
        inside = [
            _inside(chunk, count, int(first))
            for chunk, count, first in zip(cursor.chunks, lengths, firsts, strict=False)
        ]
        sums = _summed(hidden, rows, inside)
        finished, counts = [], []
        for chunk, (passages, _, _), here in zip(cursor.chunks, inside, sums, strict=True):
            sequence_id = chunk.sequence.sequence_id
            if not chunk.is_last:
                # A clone, so that one chunk does not hold the step's sums alive.
                self._sums.setdefault(sequence_id, {})[chunk.start] = passages, here.clone()
                continue
            spans = _passages(chunk)
            earlier = self._sums.get(sequence_id, {})
            whole = torch.zeros(len(spans), hidden.shape[-1], device=hidden.device)
            for indices, part in (*(earlier[start] for start in sorted(earlier)), (passages, here)):
                whole.index_add_(0, to_device(indices, hidden.device), part)
            num_tokens = (spans[:, 1] - spans[:, 0]).astype(np.float32)
            finished.append(whole / to_device(num_tokens, hidden.device)[:, None])
            counts.append(len(spans))
        means = torch.cat(finished) if finished else torch.zeros(0, hidden.shape[-1], device=hidden.device)
        return Ragged.from_lengths(self.head(means), counts)

    def free(self, sequence_id: int) -> None:
        self._sums.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._sums)


def _passages(chunk: Chunk) -> NDArray[np.int64]:
    passages = chunk.sequence.payload.passages
    assert passages is not None
    return passages


def _inside(
    chunk: Chunk, count: int, first: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The passages that have any of a chunk's `count` pooled tokens, which are numbered from `first` on among
    those of the step: their indices, and where their tokens here begin and end."""
    pooled = chunk.sequence.tokens.pooled_positions
    before = chunk.start if pooled is None else int(np.searchsorted(pooled, chunk.start))
    bounds = np.clip(_passages(chunk) - before, 0, count) + first
    there = np.flatnonzero(bounds[:, 1] > bounds[:, 0])
    return there, bounds[there, 0], bounds[there, 1]


def _summed(
    hidden: torch.Tensor,
    rows: NDArray[np.int64],
    inside: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]],
) -> list[torch.Tensor]:
    """For each chunk the sums [passages, hidden] of the rows of the passages `inside` it."""
    starts, stops = (np.concatenate([part[i] for part in inside]) for i in (1, 2))
    lengths = stops - starts
    offsets = offsets_of(lengths)
    members = rows[np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    sums = torch.zeros(len(lengths), hidden.shape[-1], device=hidden.device)
    # Passages may share rows: no more of them are copied at a time than the step has.
    most = max(len(hidden), TILE)
    for first in range(0, len(members), most):
        together = slice(first, first + most)
        sums.index_add_(0, to_device(owner[together], hidden.device), take_rows(hidden, members[together]))
    return list(sums.split([len(part[0]) for part in inside]))
