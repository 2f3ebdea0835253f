"""Scores of sparse vectors: items [entries, 2], a row a word with its id and its weight."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.ragged import Ragged, to_device
from maxsimd.pooling.sparse import dense_of

# What a word that both vectors have adds to a score, by its weights there.
_Shared: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def sparse_scores(
    similarity: str, queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]
) -> torch.Tensor:
    """The scores float32 [n] of the sparse vectors of pairs [n, 2] of a query's index and a document's: their
    dot products for `sparse`, their cosines for `sparse-cosine`, and for `sparse-euclidean` and
    `sparse-manhattan` their distances below 0."""
    if similarity == "sparse":
        return sparse_dot(queries, documents, pairs)
    if similarity == "sparse-cosine":
        squares = _of_pairs(torch.square, queries, documents, pairs)
        # As torch's normalize has it.
        lengths = [each.sqrt().clamp(min=1e-12) for each in squares]
        return (_over_shared_words(torch.mul, queries, documents, pairs) / (lengths[0] * lengths[1])).float()
    is_euclidean = similarity == "sparse-euclidean"
    of_word = torch.square if is_euclidean else torch.abs
    # All words count as if the other vector lacked them, but for those that both have.
    first, second = _of_pairs(of_word, queries, documents, pairs)
    shared = _over_shared_words(
        lambda q, d: of_word(q - d) - of_word(q) - of_word(d), queries, documents, pairs
    )
    distances = (first + second + shared).clamp(min=0)
    return -(distances.sqrt() if is_euclidean else distances).float()


def _of_pairs(
    of_weight: Callable[[torch.Tensor], torch.Tensor],
    queries: Ragged,
    documents: Ragged,
    pairs: NDArray[np.int64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums float64 [n] of something over the weights of each pair's query, and of its document."""
    sums = []
    for items, index in ((queries, pairs[:, 0]), (documents, pairs[:, 1])):
        owner = np.repeat(np.arange(len(items)), np.diff(items.offsets))
        total = torch.zeros(len(items), dtype=torch.float64, device=items.values.device)
        total.index_add_(0, to_device(owner, total.device), of_weight(items.values[:, 1].double()))
        sums.append(total[to_device(np.ascontiguousarray(index), total.device)].to(documents.values.device))
    return sums[0], sums[1]


def sparse_dot(queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
    """The dot products float32 [n] of the sparse vectors of pairs [n, 2] of a query's index and a
    document's."""
    return _over_shared_words(torch.mul, queries, documents, pairs, torch.float32)


def _over_shared_words(
    shared: _Shared,
    queries: Ragged,
    documents: Ragged,
    pairs: NDArray[np.int64],
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The sum [n] over the words that both vectors of a pair have.

    Of words that a query has more than once the first counts; each of those of a document does. A query's
    words are sorted, and each word of its documents is looked up among them."""
    device = documents.values.device
    lengths = np.diff(documents.offsets)
    scores = torch.zeros(len(pairs), dtype=dtype, device=device)
    for query in np.unique(pairs[:, 0]).tolist():
        entries = queries[query].float()  # [words, 2]
        asked = np.flatnonzero(pairs[:, 0] == query)
        of_asked = documents.take(pairs[asked, 1].tolist()).values.float()  # [entries, 2]
        if not len(entries) or not len(of_asked):
            continue
        words, order = entries[:, 0].sort(stable=True)
        at = torch.searchsorted(words, of_asked[:, 0].contiguous()).clamp(max=len(words) - 1)
        made = shared(entries[order, 1][at].to(dtype), of_asked[:, 1].to(dtype))
        owner = np.repeat(asked, lengths[pairs[asked, 1]])
        scores.index_add_(0, to_device(owner, device), torch.where(words[at] == of_asked[:, 0], made, 0.0))
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
