"""From the replies of parts to one answer."""

import numpy as np
from numpy.typing import NDArray


class Merge:
    """The scores of a request's documents, each written once. For one thread."""

    def __init__(self, num_documents: int) -> None:
        self._scores = np.full(num_documents, np.nan)
        self._is_written = np.zeros(num_documents, dtype=np.bool_)

    def commit(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Writes the scores of a part's documents. Raises ValueError, and writes nothing, where there are not
        as many scores as documents, or a document is none of the request's, comes twice, or is written."""
        if indices.shape != scores.shape:
            raise ValueError(f"{scores.size:,} scores for {indices.size:,} documents")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self._scores):
            raise ValueError(f"a document beyond the request's {len(self._scores):,}")
        if len(np.unique(indices)) < len(indices) or self._is_written[indices].any():
            raise ValueError("a document's score came twice")
        self._scores[indices] = scores
        self._is_written[indices] = True

    @property
    def missing(self) -> NDArray[np.int64]:
        """The documents without a score yet."""
        return np.flatnonzero(~self._is_written).astype(np.int64)

    def result(self) -> NDArray[np.float64]:
        """The scores [N] in the request's order. Raises ValueError where one is missing."""
        if not self._is_written.all():
            raise ValueError(f"{len(self.missing):,} documents have no score yet")
        return self._scores
