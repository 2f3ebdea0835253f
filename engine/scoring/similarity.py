"""Scores of pairs of items, by the similarity that the model was trained for."""

from collections.abc import Sequence

import torch

from maxsimd.engine.scoring.maxsim import MaxSim
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.transfer import to_device

# Those of items of one row a token; `maxsim` takes these.
TOKEN_SIMILARITIES = ("maxsim", "meanmaxsim")


def score_pairs(
    similarity: str,
    queries: Ragged,
    documents: Ragged,
    pairs: Sequence[tuple[int, int]],
    maxsim: MaxSim,
) -> torch.Tensor:
    """float32 [pairs] for pairs of (query index, document index).

    `maxsim` as in ColBERT; `meanmaxsim` is that divided by the number of query tokens; `cosine` and `dot`
    are of items of one row each.
    """
    if similarity in TOKEN_SIMILARITIES:
        return as_named(similarity, maxsim(queries, documents, pairs), queries, pairs)
    first, second = to_device(torch.tensor(pairs).T.contiguous(), documents.values.device)
    q, d = queries.values[first].float(), documents.values[second].float()
    if similarity == "cosine":
        return torch.nn.functional.cosine_similarity(q, d, dim=-1)
    return (q * d).sum(dim=-1)


def as_named(
    similarity: str, scores: torch.Tensor, queries: Ragged, pairs: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """MaxSim's scores [pairs] as one of `TOKEN_SIMILARITIES` has them."""
    if similarity == "maxsim":
        return scores
    tokens = [max(1, queries.lengths[query]) for query, _ in pairs]
    return scores / to_device(torch.tensor(tokens), scores.device)
