"""Pairs of queries and documents as MaxSim takes them."""

import numpy as np
from numpy.typing import NDArray

Pairs = NDArray[np.int64]


def pairs_of(pairs: list[tuple[int, int]]) -> Pairs:
    """Pairs of query index and document index: [n, 2]."""
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
