"""Which token of a document is most like each token of a query, for those who want to see why."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

# By as much scores may differ because sums are formed in different orders.
_SAME = 1e-4


def best_matches(query: torch.Tensor, document: torch.Tensor, window_rows: Sequence[int]) -> torch.Tensor:
    """The best match of each row of a query [Lq, dim] in each window of a document [Ld, dim], whose windows
    have `window_rows` rows: float32 [Lq, windows, 2], the row of the document (counted through all windows)
    and the dot product. Of rows that are equally good the first is taken; a window without rows has row -1
    and 0."""
    query = query.float()
    each = []
    first = 0
    for window in document.split(list(window_rows)):
        best = torch.zeros(len(query), 2, device=query.device)
        if len(window):
            similarity, row = (query @ window.float().T).max(dim=1)
            best[:, 0], best[:, 1] = row + first, similarity
        else:
            best[:, 0] = -1
        each.append(best)
        first += len(window)
    return torch.stack(each, dim=1)


def score_with_matches(
    score: torch.Tensor,
    query: torch.Tensor,
    document: torch.Tensor,
    window_rows: Sequence[int],
    is_mean: bool,
) -> torch.Tensor:
    """A score and the best matches behind it, as they leave the device: float32 [1 + Lq * windows * 2, 1].

    The matches add up to the score, or with `is_mean` have it as their mean. Where they do not, because the
    backend has rounded each product to the precision of its factors, the score becomes theirs."""
    matches = best_matches(query, document, window_rows)
    score = score.float()
    if len(document):
        there = torch.tensor(window_rows, device=matches.device) > 0
        best = matches[:, there, 1].amax(dim=1)
        exact = best.mean() if is_mean else best.sum()
        score = torch.where((exact - score).abs() <= _SAME, score, exact)
    return torch.cat([score.reshape(1, 1), matches.reshape(-1, 1)])


def matches_of(value: NDArray[np.float32], num_windows: int) -> NDArray[np.float32]:
    """The matches [Lq, windows, 2] of what `score_with_matches` has made."""
    return value[1:, 0].reshape(-1, num_windows, 2)
