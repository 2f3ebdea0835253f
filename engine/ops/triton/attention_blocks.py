"""How the queries of a launch of attention are cut into blocks, one a program and head."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def blocks_of(
    sequences: Sequence[tuple[int, int, int, int]] | NDArray[np.int64],
    causal: bool,
    prefix_keys: int,
    queries: int,
) -> NDArray[np.int32]:
    """Cuts sequences (first row, queries, first key, keys) into blocks of at most `queries` queries.

    Each block is (first row, queries, position of its first query, first key, keys): int32 [blocks, 5]. The
    blocks that see the most keys come first. Positions count from the first key of the prefix; causal queries
    are the last of their sequence's keys."""
    table = np.asarray(sequences, dtype=np.int64).reshape(-1, 4)
    counts = -(-table[:, 1] // queries)
    owner = np.repeat(np.arange(len(table)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    row, length, key, keys = table[owner].T
    position = first + (prefix_keys + (keys - length if causal else 0))
    taken = np.minimum(queries, length - first)
    seen = np.minimum(keys, position + taken - prefix_keys) if causal else keys
    blocks = np.stack([row + first, taken, position, key, keys], axis=1)
    return np.ascontiguousarray(blocks[np.argsort(-seen, kind="stable")], dtype=np.int32)


def most_blocks(rows: int, sequences: int, queries: int) -> int:
    """The most blocks of `queries` queries that up to `sequences` sequences in `rows` rows are cut into: all
    but the last of a sequence are full, and a last one has a query at least."""
    return (rows + min(rows, sequences) * (queries - 1)) // queries
