"""Scores of pairs of items, by the similarity that the model was trained for."""

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.scoring.maxsim import MaxSim
from maxsimd.engine.scoring.sparse import sparse_scores
from maxsimd.pooling.ragged import Ragged, to_device

# Those of items of one row a token; `maxsim` takes these.
TOKEN_SIMILARITIES = ("maxsim", "meanmaxsim")


def score_pairs(
    similarity: str,
    queries: Ragged,
    documents: Ragged,
    pairs: NDArray[np.int64],
    maxsim: MaxSim,
) -> torch.Tensor:
    """float32 [n] for pairs [n, 2] of a query's index and a document's.

    `maxsim` as in ColBERT; `meanmaxsim` is that divided by the number of query tokens; `cosine` and `dot`
    are of items of one row each, and so are `euclidean` and `manhattan`, the distances below 0. `sparse` is
    the dot product of sparse vectors, which `sparse-cosine` and the like compare otherwise. For `hybrid`,
    `maxsim` compares all that a text has.
    """
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
    """MaxSim's scores [n] as one of `TOKEN_SIMILARITIES` has them."""
    if similarity == "maxsim":
        return scores
    tokens = np.maximum(1, np.diff(queries.offsets))[pairs[:, 0]]
    return scores / to_device(tokens, scores.device)
