"""Scores of pairs by the similarity that the model was trained for, and the matches behind MaxSim."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.scoring.maxsim import MaxSim
from maxsimd.pooling.ragged import Ragged, to_device
from maxsimd.scheduler import Explained


def sparse_scores(
    similarity: str, queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]
) -> torch.Tensor:
    """Scores pairs of sparse vectors, items [entries, 2] of ids and weights: float32 [n]. `sparse` is the dot
    product. `sparse-euclidean` and `sparse-manhattan` are distances below 0."""
    if similarity == "sparse":
        return sparse_dot(queries, documents, pairs)
    if similarity == "sparse-cosine":
        squares = _of_pairs(torch.square, queries, documents, pairs)
        # Like torch's normalize.
        lengths = [each.sqrt().clamp(min=1e-12) for each in squares]
        return (_over_shared_words(torch.mul, queries, documents, pairs) / (lengths[0] * lengths[1])).float()
    is_euclidean = similarity == "sparse-euclidean"
    of_word = torch.square if is_euclidean else torch.abs
    # Words count as if the other vector lacked them; `shared` corrects those that both have.
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
    """Returns sums float64 [n] over the weights of each pair's query, and of its document."""
    sums = []
    for items, index in ((queries, pairs[:, 0]), (documents, pairs[:, 1])):
        owner = np.repeat(np.arange(len(items)), np.diff(items.offsets))
        total = torch.zeros(len(items), dtype=torch.float64, device=items.values.device)
        total.index_add_(0, to_device(owner, total.device), of_weight(items.values[:, 1].double()))
        sums.append(total[to_device(np.ascontiguousarray(index), total.device)].to(documents.values.device))
    return sums[0], sums[1]


def sparse_dot(queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
    """Returns the dot products float32 [n] of sparse vectors."""
    return _over_shared_words(torch.mul, queries, documents, pairs, torch.float32)


def _over_shared_words(
    shared: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    queries: Ragged,
    documents: Ragged,
    pairs: NDArray[np.int64],
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Returns sums [n] over the words that both vectors of a pair have.

    Of repeated words of a query the first counts; all of a document count. A document's words are looked
    up among the query's sorted ones. The sum is not finite if a weight of any word is not."""
    device = documents.values.device
    lengths = np.diff(documents.offsets)
    scores = torch.zeros(len(pairs), dtype=dtype, device=device)
    for query in np.unique(pairs[:, 0]).tolist():
        entries = queries[query].float()  # [words, 2]
        chosen = np.flatnonzero(pairs[:, 0] == query)
        of_chosen = documents.take(pairs[chosen, 1].tolist()).values.float()  # [entries, 2]
        made = 0 * of_chosen[:, 1].to(dtype)
        if len(entries):
            words, order = entries[:, 0].sort(stable=True)
            at = torch.searchsorted(words, of_chosen[:, 0].contiguous()).clamp(max=len(words) - 1)
            of_both = shared(entries[order, 1][at].to(dtype), of_chosen[:, 1].to(dtype))
            made = torch.where(words[at] == of_chosen[:, 0], of_both, made)
        owner = np.repeat(chosen, lengths[pairs[chosen, 1]])
        scores.index_add_(0, to_device(owner, device), made)
        of_query = (0 * entries[:, 1].to(dtype)).sum().expand(len(chosen))
        scores.index_add_(0, to_device(chosen, device), of_query)
    return scores


# Similarities of items with a row a token.
TOKEN_SIMILARITIES = ("maxsim", "meanmaxsim")


def score_pairs(
    similarity: str, queries: Ragged, documents: Ragged, pairs: NDArray[np.int64], maxsim: MaxSim
) -> torch.Tensor:
    """Returns float32 [n] for pairs [n, 2] of query and document index.

    `maxsim` as in ColBERT; `meanmaxsim` divides it by the number of query tokens. `cosine`, `dot`, and
    `euclidean` and `manhattan` (distances below 0) compare items of one row. For `sparse` and the like see
    `sparse_scores`. For `hybrid`, `maxsim` compares all that a text has."""
    if similarity in TOKEN_SIMILARITIES:
        return as_named(similarity, maxsim(queries, documents, pairs), queries, pairs)
    if similarity == "hybrid":
        return maxsim(queries, documents, pairs)
    if similarity.startswith("sparse"):
        return sparse_scores(similarity, queries, documents, pairs)
    first, second = to_device(np.ascontiguousarray(pairs.T), documents.values.device)
    q, d = queries.values[first].float(), documents.values[second].float()
    if similarity == "cosine":
        return torch.nn.functional.cosine_similarity(q, d, dim=-1)
    if similarity == "euclidean":
        distances: torch.Tensor = torch.linalg.vector_norm(q - d, dim=-1)
        return -distances
    if similarity == "manhattan":
        return -(q - d).abs().sum(dim=-1)
    return (q * d).sum(dim=-1)


def as_named(
    similarity: str, scores: torch.Tensor, queries: Ragged, pairs: NDArray[np.int64]
) -> torch.Tensor:
    """Converts MaxSim scores [n] to one of `TOKEN_SIMILARITIES`."""
    if similarity == "maxsim":
        return scores
    tokens = np.maximum(1, np.diff(queries.offsets))[pairs[:, 0]]
    return scores / to_device(tokens, scores.device)


# The last columns of an item: the id of a row's token, and its weight.
_SPARSE = 2


@dataclass(frozen=True, slots=True, eq=False)
class Hybrid:
    """Hybrid scores of bge-m3: a weighted mean of dense, sparse and multi-vector scores. Items [tokens, dim +
    2] are those of `HybridPool`; `weights` are made to sum to 1.

    Source: `M3Embedder.compute_score` in FlagEmbedding."""

    weights: tuple[float, float, float]
    maxsim: MaxSim

    def __call__(self, queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
        """Returns float32 [n] for pairs [n, 2] of query and document index."""
        first, second = to_device(np.ascontiguousarray(pairs.T), documents.values.device)
        dense = (_first_rows(queries)[first] * _first_rows(documents)[second]).sum(dim=-1)
        # Repeated tokens weigh nothing.
        words = [Ragged(items.values[:, -_SPARSE:], items.offsets) for items in (queries, documents)]
        sparse = sparse_dot(words[0], words[1], pairs)
        of_query, of_document = _other_rows(queries), _other_rows(documents)
        num_tokens = np.maximum(1, np.diff(of_query.offsets))[pairs[:, 0]]
        best = self.maxsim(of_query, of_document, pairs).float()
        parts = dense, sparse, best / to_device(num_tokens, best.device)
        return sum(
            (part * (weight / sum(self.weights)) for part, weight in zip(parts, self.weights, strict=True)),
            torch.zeros(len(pairs), device=documents.values.device, dtype=torch.float32),
        )


def _first_rows(items: Ragged) -> torch.Tensor:
    """The vector of each whole text, [items, dim]."""
    return items.values[to_device(items.offsets[:-1], items.values.device), :-_SPARSE].float()


def _other_rows(items: Ragged) -> Ragged:
    lengths = np.diff(items.offsets)
    others = np.ones(int(items.offsets[-1]), dtype=bool)
    others[items.offsets[:-1][lengths > 0]] = False
    rows = to_device(np.flatnonzero(others), items.values.device)
    return Ragged.from_lengths(items.values[rows, :-_SPARSE].contiguous(), np.maximum(lengths - 1, 0))


# Scores may differ this much because sums are formed in different orders.
_SAME = 1e-4
# Similarities held at a time: 16 MiB in float32.
_AT_ONCE = 1 << 22


def best_matches(query: torch.Tensor, document: torch.Tensor, window_rows: Sequence[int]) -> torch.Tensor:
    """Returns the best match of each query row [Lq, dim] in each window of a document [Ld, dim], whose
    windows have `window_rows` rows: float32 [Lq, windows, 2], the document's row and the dot product. The
    first of equal rows wins; a window without rows has row -1 and 0."""
    query = query.float()
    each = []
    first = 0
    for window in document.split(list(window_rows)):
        best = torch.zeros(len(query), 2, device=query.device, dtype=torch.float32)
        if len(window):
            columns = window.float().T
            for tile in range(0, len(query), at_once := max(1, _AT_ONCE // len(window))):
                similarity, row = (query[tile : tile + at_once] @ columns).max(dim=1)
                best[tile : tile + at_once, 0] = row + first
                best[tile : tile + at_once, 1] = similarity
        else:
            best[:, 0] = -1
        each.append(best)
        first += len(window)
    return torch.stack(each, dim=1)


def score_with_matches(
    score: torch.Tensor,
    query: torch.Tensor,
    document: torch.Tensor,
    explained: Explained,
    share: float | None,
) -> torch.Tensor:
    """Returns a score and its best matches as they leave the device: float32 [1 + Lq * windows * 2, 1], then
    the similarities [Lq, Ld] if there is a map.

    The score is the sum of the matches; for means, their mean times `share`, the share of the query's rows
    in `query`. A backend's score that differs, because it rounds products, is replaced."""
    matches = best_matches(query, document, explained.rows)
    score = score.float()
    if len(document):
        of_windows = [matches[:, i, 1] for i, rows in enumerate(explained.rows) if rows]
        best = torch.stack(of_windows).amax(dim=0)
        exact = best.sum() if share is None else best.mean() * share
        score = torch.where((exact - score).abs() <= _SAME, score, exact)
    parts = [score.reshape(1, 1), matches.reshape(-1, 1)]
    if explained.with_map:
        parts.append((query.float() @ document.float().T).reshape(-1, 1))
    return torch.cat(parts)


def matches_of(value: NDArray[np.float32], explained: Explained) -> NDArray[np.float32]:
    """Reads the matches [Lq, windows, 2] from what `score_with_matches` made."""
    windows = len(explained.rows)
    query_rows = (len(value) - 1) // (2 * windows + _mapped(explained))
    return value[1 : 1 + query_rows * windows * 2, 0].reshape(-1, windows, 2)


def similarities_of(value: NDArray[np.float32], explained: Explained) -> NDArray[np.float32]:
    """Reads the similarities [Lq, Ld] of a map from what `score_with_matches` made."""
    mapped = _mapped(explained)
    query_rows = (len(value) - 1) // (2 * len(explained.rows) + mapped)
    return value[len(value) - query_rows * mapped :, 0].reshape(query_rows, mapped)


def _mapped(explained: Explained) -> int:
    return sum(explained.rows) if explained.with_map else 0
