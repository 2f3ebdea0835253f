"""Positions of tokens beside pictures, as the Qwen-VL models count them: in time, height and width (M-RoPE).

Source: Wang et al. 2024 (arXiv 2409.12191), section 2.1."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def rope_positions(length: int, images: Iterable[tuple[int, tuple[int, int]]]) -> NDArray[np.int64]:
    """The positions [3, length] of a sequence whose `images`, in their order, each begin at a token and have
    a grid of rows and columns, a token a patch.

    Tokens of text have one number in all three. From a picture's first position on, rows are counted in
    height and columns in width; what follows counts on from behind the longer side."""
    positions = np.empty((3, length), dtype=np.int64)
    done = following = 0
    for first, (rows, columns) in images:
        behind = first + rows * columns
        positions[:, done:first] = np.arange(first - done) + following
        following += first - done
        row, column = np.divmod(np.arange(rows * columns), columns)
        positions[:, first:behind] = following + np.stack([np.zeros_like(row), row, column])
        following += max(rows, columns)
        done = behind
    positions[:, done:] = np.arange(length - done) + following
    return positions
