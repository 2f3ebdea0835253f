"""Scores of sparse vectors: items [entries, 2], a row a word with its id and its weight."""

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.sparse import dense_of
from maxsimd.pooling.transfer import to_device


def sparse_dot(queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
    """The dot products float32 [n] of the sparse vectors of pairs [n, 2] of a query's index and a document's.

    Of words that a query has more than once the first counts; each of those of a document does. A query's
    words are sorted, and each word of its documents is looked up among them."""
    device = documents.values.device
    lengths = np.diff(documents.offsets)
    scores = torch.zeros(len(pairs), device=device)
    for query in np.unique(pairs[:, 0]).tolist():
        entries = queries[query].float()  # [words, 2]
        asked = np.flatnonzero(pairs[:, 0] == query)
        of_asked = documents.take(pairs[asked, 1].tolist()).values.float()  # [entries, 2]
        if not len(entries) or not len(of_asked):
            continue
        words, order = entries[:, 0].sort(stable=True)
        at = torch.searchsorted(words, of_asked[:, 0].contiguous()).clamp(max=len(words) - 1)
        weights = torch.where(words[at] == of_asked[:, 0], entries[order, 1][at], 0.0)
        owner = np.repeat(asked, lengths[pairs[asked, 1]])
        scores.index_add_(0, to_device(owner, device), weights * of_asked[:, 1])
    return scores


def sparse_dot_reference(
    queries: Ragged, documents: Ragged, pairs: NDArray[np.int64], num_words: int
) -> torch.Tensor:
    """The same, plainly: each vector with a weight for all `num_words` words."""
    scores = [
        dense_of(queries[query], num_words).double() @ dense_of(documents[document], num_words).double()
        for query, document in pairs.tolist()
    ]
    return torch.stack(scores).float() if scores else torch.zeros(0)
