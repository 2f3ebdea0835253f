"""Scores of pairs of items, by the similarity that the model was trained for."""

from collections.abc import Sequence

import torch

from maxsimd.pooling.maxsim import MaxSim
from maxsimd.pooling.ragged import Ragged


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
    if similarity in ("maxsim", "meanmaxsim"):
        scores = maxsim(queries, documents, pairs)
        if similarity == "meanmaxsim":
            tokens = [max(1, queries.lengths[query]) for query, _ in pairs]
            scores = scores / torch.tensor(tokens, device=scores.device)
        return scores
    device = documents.values.device
    q = queries.values[torch.tensor([query for query, _ in pairs], device=device)].float()
    d = documents.values[torch.tensor([document for _, document in pairs], device=device)].float()
    if similarity == "cosine":
        return torch.nn.functional.cosine_similarity(q, d, dim=-1)
    return (q * d).sum(dim=-1)
