"""Cached embeddings that stay on the device, so that scoring them again copies nothing to it.

The slab is a second copy of what the cache has on the host: a document is cached where the host says so, and
only then looked for here. What is not here is copied again.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, repeat

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.cache.embeddings import CachedEmbedding
from maxsimd.pooling.ragged import Ragged, Spans, decoded, join_into, joined_on

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


# A document's first row and number of rows are one number in the index, so that one look-up finds both.
_LENGTH_BITS = 31
_LENGTH = (1 << _LENGTH_BITS) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Of some documents those that are in the slab: `resident` [n] are their indices, and `spans` [n] where
    they lie; `absent` are the indices of the rest."""

    resident: Indices
    spans: Spans
    absent: Indices


class EmbeddingSlab:
    """Embeddings by their cache key in one tensor of `rows` rows: of `dim` numbers of `dtype`, and if that is
    int8 with a float32 scale a row.

    Only the device thread calls `put` and `locate`, which launch copies on the device's current stream;
    `drop` and `clear`, which change nothing on the device, may be called from anywhere. What `locate` has
    found stays as it is until whatever was launched before the next call of `put` or `locate` has run:
    these alone write to rows, and a stream runs what it is given in order. So rows that a launched step may
    still read can be given to another document at once.

    A second `put` under a key takes the place of the first, so that a step may be tried again."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._segments = Segments(rows)
        self._values = torch.empty(self._segments.rows, dim, dtype=dtype, device=device)
        self._scales: torch.Tensor | None = None
        if dtype is torch.int8:
            self._scales = torch.empty(self._segments.rows, dtype=torch.float32, device=device)
        self._index: dict[bytes | None, int] = {}
        self._keys: list[list[bytes]] = [[] for _ in range(self._segments.count)]
        self._lock = threading.Lock()
        self.hits = self.copied = self.evictions = 0

    def __len__(self) -> int:
        """How many documents are in it."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """What it takes of the device's memory, used or not."""
        return self._values.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def put(self, keys: Sequence[bytes], embeddings: Ragged) -> None:
        """Copies embeddings that are on the device, as far as they fit."""
        if self._scales is None:
            embeddings = embeddings.decoded(self._values.dtype)
        with self._turn():
            lengths = np.diff(embeddings.offsets)
            starts = self._reserve(lengths)
            for first, last in _runs(starts, lengths):
                rows = slice(*embeddings.offsets[[first, last]].tolist())
                to = slice(int(starts[first]), int(starts[first]) + rows.stop - rows.start)
                self._values[to] = embeddings.values[rows]
                if self._scales is not None:
                    assert embeddings.scales is not None
                    self._scales[to] = embeddings.scales[rows]
            self._enter(keys, starts, lengths)

    def locate(self, keys: Sequence[bytes | None], embeddings: Sequence[CachedEmbedding]) -> Located:
        """Where the documents under these keys lie. Those that are not in the slab are copied to it from
        their `embeddings` on the host, as far as they fit; what has no key stays out."""
        with self._turn():
            found = self._look_up(keys)
            self._segments.touch(found[found != ABSENT] >> _LENGTH_BITS)
            self.hits += int(np.count_nonzero(found != ABSENT))
            absent = np.flatnonzero(found == ABSENT)
            wanted = {key: embeddings[i] for i in absent.tolist() if (key := keys[i]) is not None}
            if wanted:
                self._copy_from_host([*wanted], [*wanted.values()])
                found[absent] = self._look_up([keys[i] for i in absent.tolist()])
                absent = np.flatnonzero(found == ABSENT)
        resident = np.flatnonzero(found != ABSENT) if len(absent) else np.arange(len(found))
        starts, lengths = found[resident] >> _LENGTH_BITS, found[resident] & _LENGTH
        return Located(resident, Spans(self._values, starts, starts + lengths, self._scales), absent)

    def drop(self, key: bytes) -> None:
        """Forgets a document."""
        with self._lock:
            self._index.pop(key, None)

    def clear(self) -> None:
        """Forgets all documents."""
        with self._lock:
            self._empty()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Work on the slab. Where it fails on the way, nothing in the slab is certain any more, and all is
        forgotten."""
        with self._lock:
            self._segments.begin_turn()
            try:
                yield
            except BaseException:
                self._empty()
                raise

    def _empty(self) -> None:
        self._index.clear()
        for keys in self._keys:
            keys.clear()
        self._segments.clear()

    def _look_up(self, keys: Sequence[bytes | None]) -> Indices:
        return np.fromiter(map(self._index.get, keys, repeat(ABSENT)), np.int64, len(keys))

    def _copy_from_host(self, keys: list[bytes], embeddings: list[CachedEmbedding]) -> None:
        lengths = np.array([embedding.rows.shape[0] for embedding in embeddings])
        starts = self._reserve(lengths)
        for first, last in _runs(starts, lengths):
            run = embeddings[first:last]
            start, stop = int(starts[first]), int(starts[last - 1] + lengths[last - 1])
            self._copy_run(run, slice(start, stop))
            self.copied += len(run)
        self._enter(keys, starts, lengths)

    def _copy_run(self, run: list[CachedEmbedding], to: slice) -> None:
        rows = [embedding.rows for embedding in run]
        scales = [embedding.scales for embedding in run if embedding.scales is not None]
        if rows[0].dtype is self._values.dtype:
            join_into(rows, self._values[to])
            if self._scales is not None:
                join_into(scales, self._scales[to])
            return
        device = self._values.device
        together = joined_on(device, rows)
        with_scales = joined_on(device, scales) if scales else None
        self._values[to] = decoded(together, with_scales, self._values.dtype)

    def _reserve(self, lengths: Indices) -> Indices:
        """The first rows for documents of these lengths; `ABSENT` for those that do not fit."""
        starts, emptied = self._segments.reserve(lengths)
        for segment in emptied:
            for key in self._keys[segment]:
                found = self._index.get(key, ABSENT)
                if found != ABSENT and (found >> _LENGTH_BITS) // self._segments.size == segment:
                    del self._index[key]
                    self.evictions += 1
            self._keys[segment].clear()
        return starts

    def _enter(self, keys: Sequence[bytes], starts: Indices, lengths: Indices) -> None:
        """Makes documents findable whose rows have been copied, and those no longer that did not fit."""
        packed = starts << _LENGTH_BITS | lengths
        found = zip(keys, packed.tolist(), self._segments.of(starts).tolist(), strict=True)
        for key, rows, segment in found:
            if rows < 0:
                self._index.pop(key, None)
                continue
            self._index[key] = rows
            self._keys[segment].append(key)


def _runs(starts: Indices, lengths: Indices) -> Iterator[tuple[int, int]]:
    """Runs of documents, as (first, last), that lie end to end from `starts` on; those that are absent are in
    none."""
    together = (starts[1:] == starts[:-1] + lengths[:-1]) & (starts[:-1] != ABSENT)
    for first, last in pairwise([0, *(np.flatnonzero(~together) + 1).tolist(), len(starts)]):
        if first < last and starts[first] != ABSENT:
            yield first, last
