"""Which rows of a slab belong to whom: rows are given out in segments, the least recently used goes first."""

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

ABSENT = -1

# A larger segment wastes less where a document does not fit into what is left of it; with a smaller one fewer
# documents go at a time.
_SEGMENT_ROWS = 65_536
_FEWEST_SEGMENTS = 8


class Segments:
    """`rows` rows, or a few less, in `count` segments of `size` rows each. Rows are given out one after the
    other within a segment, and are free again when the whole segment is.

    A free list of ranges would lose fewer documents at a time, but with documents of different lengths it
    breaks into pieces and must be searched for each document. Here neither happens: giving out rows for a
    whole step is a few operations on arrays. Documents that come together lie together, and are mostly asked
    for together; those of a segment that had to go and are still asked for are copied into a new one, beside
    others of their kind. Work is done in turns: what has been used in a turn stays until its end."""

    def __init__(self, rows: int) -> None:
        self.count = max(_FEWEST_SEGMENTS, rows // _SEGMENT_ROWS)
        self.size = rows // self.count
        if self.size == 0:
            raise ValueError(f"a slab of {rows} rows is too small")
        self._used = np.zeros(self.count, dtype=np.int64)  # the turn of each segment's last use, 0 for never
        self._turn = 0
        self._current = self._filled = 0

    @property
    def rows(self) -> int:
        return self.count * self.size

    def begin_turn(self) -> None:
        """From now on all segments may go, until they are used again."""
        self._turn += 1

    def of(self, rows: Indices) -> Indices:
        """The segments of these rows."""
        segments: Indices = rows // self.size
        return segments

    def touch(self, rows: Indices) -> None:
        """Notes that these rows are used in this turn."""
        self._used[self.of(rows)] = self._turn

    def reserve(self, lengths: Indices) -> tuple[Indices, list[int]]:
        """The first of as many rows for each document, `ABSENT` where there is no room; and which segments
        had to go for them."""
        taken = np.maximum(lengths, 1)  # so that a document without rows has a segment too
        starts = np.full(len(lengths), ABSENT, dtype=np.int64)
        left = np.flatnonzero(taken <= self.size)
        emptied: list[int] = []
        while len(left):
            ends = np.cumsum(taken[left])
            fit = int(np.searchsorted(ends, self.size - self._filled, side="right"))
            if fit:
                begin = self._current * self.size + self._filled
                starts[left[:fit]] = begin + ends[:fit] - taken[left[:fit]]
                self._filled += int(ends[fit - 1])
                self._used[self._current] = self._turn
                left = left[fit:]
            if len(left):
                oldest = int(self._used.argmin())
                if self._used[oldest] == self._turn:
                    break
                emptied.append(oldest)
                self._current, self._filled = oldest, 0
        return starts, emptied

    def clear(self) -> None:
        """All segments are free."""
        self._used[:] = 0
        self._current = self._filled = 0
