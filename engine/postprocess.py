"""Values to results: activation, ranking and shortening. Functions of their input."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.requests import RankedDocument
from maxsimd.pooling.methods import Head

# Rows that an activation is applied to at a time. torch takes whole vectors of numbers in one way and what is
# left over in another, which may differ in the last bit: with this number of rows nothing is left over.
_ROWS = 64


def activate(logits: NDArray[np.float32], activation: Head) -> NDArray[np.float32]:
    """The activation of each row [labels] of logits [n, labels] by itself, whatever other rows there are."""
    filled = np.zeros((len(logits) + -len(logits) % _ROWS, logits.shape[1]), dtype=np.float32)
    filled[: len(logits)] = logits
    parts = [activation(part) for part in torch.from_numpy(filled).split(_ROWS)]
    return torch.cat(parts).numpy()[: len(logits)]


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
