"""Hybrid scores of bge-m3 and its kin: dense, sparse and multi-vector ones in one weighted mean."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.scoring.maxsim import MaxSim
from maxsimd.engine.scoring.sparse import sparse_dot
from maxsimd.pooling.ragged import Ragged, to_device

# The last columns of an item: the id of a row's token, and its weight.
_SPARSE = 2


@dataclass(frozen=True, slots=True, eq=False)
class Hybrid:
    """Scores pairs of items [tokens, dim + 2] as `HybridPool` makes them: by the dot product of their first
    rows, by that of their sparse vectors, and by the mean over the query's other rows of each one's best
    match among the document's. `weights` are those of the three, in this order; their sum is made 1.

    Source: `M3Embedder.compute_score` in FlagEmbedding."""

    weights: tuple[float, float, float]
    maxsim: MaxSim

    def __call__(self, queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
        """The scores float32 [n] of pairs [n, 2] of a query's index and a document's."""
        parts = self.parts(queries, documents, pairs)
        return sum(
            (part * (weight / sum(self.weights)) for part, weight in zip(parts, self.weights, strict=True)),
            torch.zeros(len(pairs), device=documents.values.device),
        )

    def parts(
        self, queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The scores [n] by dense, sparse and multi-vector embeddings."""
        first, second = to_device(np.ascontiguousarray(pairs.T), documents.values.device)
        dense = (_first_rows(queries)[first] * _first_rows(documents)[second]).sum(dim=-1)
        sparse = sparse_dot(_sparse_of(queries), _sparse_of(documents), pairs)
        of_query, of_document = _other_rows(queries), _other_rows(documents)
        num_tokens = np.maximum(1, np.diff(of_query.offsets))[pairs[:, 0]]
        best = self.maxsim(of_query, of_document, pairs).float()
        return dense, sparse, best / to_device(num_tokens, best.device)


def _first_rows(items: Ragged) -> torch.Tensor:
    """The vector of each whole text, [items, dim]."""
    return items.values[to_device(items.offsets[:-1], items.values.device), :-_SPARSE].float()


def _other_rows(items: Ragged) -> Ragged:
    """The vectors of each text's tokens."""
    lengths = np.diff(items.offsets)
    others = np.ones(int(items.offsets[-1]), dtype=bool)
    others[items.offsets[:-1][lengths > 0]] = False
    rows = to_device(np.flatnonzero(others), items.values.device)
    return Ragged.from_lengths(items.values[rows, :-_SPARSE].contiguous(), np.maximum(lengths - 1, 0))


def _sparse_of(items: Ragged) -> Ragged:
    """Each text's sparse vector, in which tokens that come again weigh nothing."""
    return Ragged(items.values[:, -_SPARSE:], items.offsets)
