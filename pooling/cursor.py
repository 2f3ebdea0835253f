"""Where each chunk's rows stand in a step's hidden states.

The contract between whoever runs the model and whoever pools: everything here is a CPU integer, so pooling
never waits for the device to learn a length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.transfer import to_device
from maxsimd.scheduler import Chunk


@dataclass(frozen=True, slots=True, eq=False)
class PoolingCursor:
    """The chunks of a step and the row at which each begins: chunk i is `hidden[starts[i]:][:len(chunk)]`.

    Rows between two chunks, if any, are padding and mean nothing.
    """

    chunks: tuple[Chunk, ...]
    starts: tuple[int, ...]

    def select(self, wanted: Callable[[Chunk], bool]) -> "PoolingCursor":
        """The cursor of those chunks alone."""
        picked = [i for i, chunk in enumerate(self.chunks) if wanted(chunk)]
        return PoolingCursor(tuple(self.chunks[i] for i in picked), tuple(self.starts[i] for i in picked))

    def pooled_rows(self) -> tuple[NDArray[np.int64], list[int]]:
        """The rows of the tokens that take part in pooling, and how many each chunk has."""
        rows = []
        for chunk, start in zip(self.chunks, self.starts, strict=True):
            pooled = chunk.sequence.tokens.pooled_positions
            if pooled is None:
                rows.append(np.arange(start, start + len(chunk)))
            else:
                low, high = np.searchsorted(pooled, (chunk.start, chunk.stop))
                rows.append(pooled[low:high] + (start - chunk.start))
        if not rows:
            return np.empty(0, dtype=np.int64), []
        return np.concatenate(rows), [len(part) for part in rows]


def take_rows(hidden: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """`hidden[rows]` as float32: one slice where the rows are contiguous, else one gather."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and bool((rows[1:] - rows[:-1] == 1).all()):
        return hidden[int(rows[0]) : int(rows[-1]) + 1].float()
    return hidden.index_select(0, to_device(rows, hidden.device)).float()
