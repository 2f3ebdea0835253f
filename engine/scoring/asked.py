"""Which queries a step's documents are scored against, and where the scores go."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import Explained, ResultSlot

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The `embeddings` [tokens, dim] of queries, the `pairs` [n, 2] of query index and document index to
    score, the slot of each pair's score, and of the pairs that are to be explained how, by their index. Where
    the embeddings are a part of a query's rows, `share` is which share of them."""

    embeddings: list[torch.Tensor]
    pairs: Indices
    slots: tuple[ResultSlot, ...]
    explained: Mapping[int, Explained]
    share: float = 1.0

    @classmethod
    def of_one(
        cls,
        embedding: torch.Tensor,
        slots: tuple[ResultSlot, ...],
        explained: Mapping[int, Explained],
        share: float = 1.0,
    ) -> Self:
        """One query and as many documents as there are slots."""
        pairs = np.zeros((len(slots), 2), dtype=np.int64)
        pairs[:, 1] = np.arange(len(slots))
        return cls([embedding], pairs, slots, explained, share)

    @property
    def queries(self) -> Ragged:
        return Ragged.from_items(self.embeddings)

    def of_documents(self, documents: Indices) -> "Asked":
        """What is asked of these documents alone, each now with its index among them."""
        position = np.full(max(self.pairs[:, 1].max(initial=-1), documents.max(initial=-1)) + 1, -1)
        position[documents] = np.arange(len(documents))
        at = position[self.pairs[:, 1]]
        wanted = np.flatnonzero(at >= 0)
        pairs = np.column_stack([self.pairs[wanted, 0], at[wanted]])
        indices = wanted.tolist()
        explained = {new: self.explained[old] for new, old in enumerate(indices) if old in self.explained}
        return Asked(self.embeddings, pairs, tuple(self.slots[i] for i in indices), explained, self.share)
