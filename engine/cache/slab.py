"""The slab: copies of cached embeddings on the device, so that scoring them again copies nothing.

A document is looked up in the host's cache first. If it is not in the slab, it is copied again.
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

# Larger segments waste less room at their ends; smaller ones evict fewer documents at a time.
_SEGMENT_ROWS = 65_536
_FEWEST_SEGMENTS = 8


class Segments:
    """About `rows` rows in `count` segments of `size` rows. Rows are given out in order within a segment and
    freed with the whole segment, the least recently used first.

    A free list of ranges would evict fewer documents at a time, but would fragment and need a search for
    each document. Here a step's rows take a few array operations. Segments used in a turn stay until its
    end."""

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
        """Allows all segments to be evicted until they are used again."""
        self._turn += 1

    def touch(self, rows: Indices) -> None:
        """Marks the segments of rows as used in this turn."""
        self._used[rows // self.size] = self._turn

    def reserve(self, lengths: Indices) -> tuple[Indices, list[int]]:
        """Returns each document's first row, `ABSENT` without room, and the segments evicted for them."""
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
        self._used[:] = 0
        self._current = self._filled = 0


# The index packs a document's first row and number of rows into one number.
_LENGTH_BITS = 31
_LENGTH = (1 << _LENGTH_BITS) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """The documents in the slab: their indices `resident` [n] and their `spans` [n]. `absent` are the
    indices of the others."""

    resident: Indices
    spans: Spans
    absent: Indices


class EmbeddingSlab:
    """Embeddings by cache key in one tensor of `rows` rows of `dim` numbers, and a float32 scale a row for
    int8.

    Only the device thread calls `put` and `locate`, which launch copies on the current stream. `drop` and
    `clear` touch no device memory and may be called from anywhere. What `locate` returned stays valid for
    work launched before the next `put` or `locate`: only these write rows, and a stream runs in order. So
    rows can be given to another document while a launched step may still read them.

    A second `put` under a key replaces the first, so that a step may be retried."""

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
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, used or not."""
        return self._values.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def put(self, keys: Sequence[bytes], embeddings: Ragged) -> None:
        """Copies embeddings on the device, as far as they fit."""
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
        """Finds documents by their keys. Missing ones are copied from their `embeddings` on the host, as
        far as they fit; documents without a key stay out."""
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
        with self._lock:
            self._index.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._empty()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Guards work on the slab. If it fails midway, everything is forgotten."""
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
        """Makes copied documents findable, and those that did not fit no longer."""
        packed = starts << _LENGTH_BITS | lengths
        segments = starts // self._segments.size
        found = zip(keys, packed.tolist(), segments.tolist(), strict=True)
        for key, rows, segment in found:
            if rows < 0:
                self._index.pop(key, None)
                continue
            self._index[key] = rows
            self._keys[segment].append(key)


def _runs(starts: Indices, lengths: Indices) -> Iterator[tuple[int, int]]:
    """Yields runs (first, last) of documents that lie end to end, without absent ones."""
    together = (starts[1:] == starts[:-1] + lengths[:-1]) & (starts[:-1] != ABSENT)
    for first, last in pairwise([0, *(np.flatnonzero(~together) + 1).tolist(), len(starts)]):
        if first < last and starts[first] != ABSENT:
            yield first, last
