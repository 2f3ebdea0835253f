"""Which token of a document is most like each token of a query, for those who want to see why."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.scheduler import Explained

# By as much scores may differ because sums are formed in different orders.
_SAME = 1e-4
# Similarities that are held at a time: 16 MiB of them in float32.
_AT_ONCE = 1 << 22


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
    """A score and the best matches behind it, as they leave the device: float32 [1 + Lq * windows * 2, 1];
    and behind these the similarities [Lq, Ld] of all vectors, if there is to be a map.

    The score is the sum of the matches. If scores are means, it is the mean of the matches times `share`, the
    share of the query's rows that `query` has. If the backend's score differs, because it rounds each product
    to the precision of its factors, the score from the matches replaces it."""
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
    """The matches [Lq, windows, 2] of what `score_with_matches` has made."""
    windows = len(explained.rows)
    query_rows = (len(value) - 1) // (2 * windows + _mapped(explained))
    return value[1 : 1 + query_rows * windows * 2, 0].reshape(-1, windows, 2)


def similarities_of(value: NDArray[np.float32], explained: Explained) -> NDArray[np.float32]:
    """The similarities [Lq, Ld] of what `score_with_matches` has made for a map."""
    mapped = _mapped(explained)
    query_rows = (len(value) - 1) // (2 * len(explained.rows) + mapped)
    return value[len(value) - query_rows * mapped :, 0].reshape(query_rows, mapped)


def _mapped(explained: Explained) -> int:
    """How many similarities there are of each vector of the query."""
    return sum(explained.rows) if explained.with_map else 0
