"""Values to results: ranking and shortening. Functions of their input."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.requests import RankedDocument


def rank(scores: Sequence[float], documents: Sequence[str], top_n: int | None) -> list[RankedDocument]:
    """Documents best first, ties in input order; the first `top_n` of them, all for None or 0."""
    order = sorted(range(len(documents)), key=lambda i: (-scores[i], i))
    return [RankedDocument(i, scores[i], documents[i]) for i in order[: top_n or None]]


def shorten(rows: NDArray[np.float32], dimensions: int | None, normalised: bool) -> NDArray[np.float32]:
    """The first `dimensions` columns of each row, L2-normalised again where the model normalises.

    Source: matryoshka embeddings, Kusupati et al. 2022 (arXiv 2205.13147)."""
    if dimensions is None or dimensions == rows.shape[-1]:
        return rows
    rows = rows[..., :dimensions]
    if normalised:
        rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    return rows
