"""The pooling methods: from the rows of a step's chunks to one item per finished sequence.

A method pools all its chunks of a step at once, and keeps state of sequences that are still in prefill.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.ragged import Ragged, offsets_of, to_device
from maxsimd.scheduler import Chunk, TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class PoolingCursor:
    """The rows of a step's chunks in its hidden states: chunk i is `hidden[starts[i]:][:len(chunk)]`. Others
    are padding. All numbers are CPU integers, so pooling never waits for the device."""

    chunks: tuple[Chunk, ...]
    starts: tuple[int, ...]

    def select(self, wanted: Callable[[Chunk], bool]) -> "PoolingCursor":
        picked = [i for i, chunk in enumerate(self.chunks) if wanted(chunk)]
        return PoolingCursor(tuple(self.chunks[i] for i in picked), tuple(self.starts[i] for i in picked))

    def pooled_rows(self) -> tuple[NDArray[np.int64], list[int]]:
        """The rows of the tokens that take part in pooling, and how many each chunk has."""
        rows = []
        for chunk, start in zip(self.chunks, self.starts, strict=True):
            pooled = chunk.sequence.tokens.pooled_positions
            if pooled is None:
                rows.append(np.arange(start, start + len(chunk)))
            else:
                low, high = np.searchsorted(pooled, (chunk.start, chunk.stop))
                rows.append(pooled[low:high] + (start - chunk.start))
        if not rows:
            return np.empty(0, dtype=np.int64), []
        return np.concatenate(rows), [len(part) for part in rows]


def take_rows(hidden: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """`hidden[rows]` as float32: one slice where the rows are contiguous, else one gather."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and bool((rows[1:] - rows[:-1] == 1).all()):
        return hidden[int(rows[0]) : int(rows[-1]) + 1].float()
    return hidden.index_select(0, to_device(rows, hidden.device)).float()


Head = Callable[[torch.Tensor], torch.Tensor]

# Rows that a head is applied to at a time on a CPU.
TILE = 1024


class GatheringHead(ABC):
    """A head that gathers rows itself."""

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def gather(self, hidden: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """The head of `hidden[rows]`: [len(rows), dim], in a precision of its own."""


# Pooling methods by the name that configurations give. A class with a name registers itself.
METHODS: dict[str, type["PoolingMethod"]] = {}
# Names of methods by sentence-transformers' `pooling_mode`: "max" is "max-pooling", for example.
MODES: dict[str, str] = {}
# Separates the names of methods whose rows are concatenated.
CONCATENATED = "+"


class PoolingMethod(ABC):
    """Pools sequences, whole or in chunks, and has the state of unfinished ones. `head` maps rows [n, hidden]
    to [n, dim] (projection, classifier, normalization), in float32."""

    def __init_subclass__(cls, name: str | None = None, mode: str | None = None) -> None:
        """Registers a method by its `name` and, if it has one, sentence-transformers' `mode`."""
        if name is None:
            return
        if name in METHODS or mode in MODES:
            raise ValueError(f"there are two pooling methods {name!r}, or two for the mode {mode!r}")
        METHODS[name] = cls
        if mode is not None:
            MODES[mode] = name

    def __init__(self, head: Head) -> None:
        self.head = head
        # States of unfinished sequences, by sequence id and the chunk's first token.
        self._states: dict[int, dict[int, Any]] = {}

    @abstractmethod
    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        """Pools one step's chunks of this method from `hidden` [rows, hidden]: an item for each chunk that is
        its sequence's last, in order. A second call with the same cursor changes nothing more."""

    def comparable(self, item: torch.Tensor) -> torch.Tensor:
        """An item [n, dim] as numbers that can be compared with those of another precision."""
        return item

    def free(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._states)

    def _keep(self, chunk: Chunk, state: Any) -> None:
        """Keeps the state of a chunk. Tensors are clones, which do not keep the whole step's alive."""
        self._states.setdefault(chunk.sequence.sequence_id, {})[chunk.start] = state

    def _earlier(self, chunk: Chunk) -> list[Any]:
        """The states of the sequence's earlier chunks, in order."""
        if chunk.is_first:
            return []
        states = self._states.get(chunk.sequence.sequence_id, {})
        return [states[start] for start in sorted(states)]


class AllPool(PoolingMethod, name="all"):
    """The projected row of every pooled token: [tokens, dim] per sequence. A CPU applies the head to tiles of
    rows, which stay in its cache."""

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        rows, lengths = cursor.pooled_rows()
        projected = Ragged.from_lengths(self._project(hidden, rows), lengths)
        if all(chunk.is_whole for chunk in cursor.chunks):
            return projected
        finished = []
        for chunk, part in zip(cursor.chunks, projected, strict=True):
            if not chunk.is_last:
                self._keep(chunk, part.clone())
                continue
            earlier = self._earlier(chunk)
            finished.append(torch.cat([*earlier, part]) if earlier else part)
        return Ragged.from_items(finished) if finished else Ragged(projected.values[:0], (0,))

    def _project(self, hidden: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        if isinstance(self.head, GatheringHead):
            return self.head.gather(hidden, rows)
        if hidden.device.type != "cpu" or len(rows) <= TILE:
            return self.head(take_rows(hidden, rows))
        return torch.cat(
            [self.head(take_rows(hidden, rows[first : first + TILE])) for first in range(0, len(rows), TILE)]
        )


class _OneVectorPool(PoolingMethod):
    """Base of the methods that make one vector per sequence: [1, dim]."""

    def _finish(self, pooled: torch.Tensor) -> Ragged:
        return Ragged.one_row_each(self.head(pooled))


class _OneTokenPool(_OneVectorPool):
    """Base of the methods that take the row of one token."""

    @abstractmethod
    def _position(self, sequence: TokenSequence) -> int:
        """The position of the token whose row is taken."""

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        having, rows = [], []
        for chunk, start in zip(cursor.chunks, cursor.starts, strict=True):
            position = self._position(chunk.sequence)
            if chunk.start <= position < chunk.stop:
                having.append(chunk)
                rows.append(start + position - chunk.start)
        taken = take_rows(hidden, np.array(rows, dtype=np.int64))
        finished = [chunk for chunk in cursor.chunks if chunk.is_last]
        if having == finished:
            return self._finish(taken)
        here = {chunk.sequence.sequence_id: row for chunk, row in zip(having, taken, strict=True)}
        for chunk in having:
            if not chunk.is_last:
                self._keep(chunk, here[chunk.sequence.sequence_id].clone())
        vectors = []
        for chunk in finished:
            row = here.get(chunk.sequence.sequence_id)
            vectors.append(self._earlier(chunk)[0] if row is None else row)
        return self._finish(torch.stack(vectors) if vectors else taken[:0])


class ClsPool(_OneTokenPool, name="cls", mode="cls"):
    """The first token's row."""

    def _position(self, sequence: TokenSequence) -> int:
        return 0


class AfterPromptPool(_OneTokenPool, name="cls-after-prompt"):
    """The row of the first pooled token, which is behind the prompt."""

    def _position(self, sequence: TokenSequence) -> int:
        pooled = sequence.tokens.pooled_positions
        return 0 if pooled is None else int(pooled[0])


class LastPool(_OneTokenPool, name="last", mode="lasttoken"):
    """The row of the last pooled token."""

    def _position(self, sequence: TokenSequence) -> int:
        pooled = sequence.tokens.pooled_positions
        return len(sequence) - 1 if pooled is None else int(pooled[-1])


class MaxPool(_OneVectorPool, name="max-pooling", mode="max"):
    """The maximum of each column over the pooled rows."""

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        rows, lengths = cursor.pooled_rows()
        owner = np.repeat(np.arange(len(lengths)), lengths)
        found = torch.full(
            (len(lengths), hidden.shape[-1]), -torch.inf, device=hidden.device, dtype=torch.float32
        )
        index = to_device(owner, hidden.device)[:, None].expand(-1, hidden.shape[-1])
        found.scatter_reduce_(0, index, take_rows(hidden, rows), "amax")
        finished = []
        for chunk, greatest in zip(cursor.chunks, found, strict=True):
            if not chunk.is_last:
                self._keep(chunk, greatest.clone())
                continue
            earlier = self._earlier(chunk)
            finished.append(torch.stack([*earlier, greatest]).amax(0) if earlier else greatest)
        return self._finish(torch.stack(finished) if finished else found[:0])


class MeanPool(_OneVectorPool, name="mean", mode="mean"):
    """The mean of the pooled rows, summed in float32. The state of a chunk is its sum."""

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        rows, lengths = cursor.pooled_rows()
        owner = np.repeat(np.arange(len(lengths)), lengths)
        sums = torch.zeros(len(lengths), hidden.shape[-1], device=hidden.device, dtype=torch.float32)
        values, weights = take_rows(hidden, rows), self._weights(rows, owner, cursor)
        if weights is not None:
            values = values * to_device(weights, values.device)[:, None]
        sums.index_add_(0, to_device(owner, hidden.device), values)
        finished, totals = [], []
        for i, chunk in enumerate(cursor.chunks):
            if not chunk.is_last:
                self._keep(chunk, sums[i].clone())
                continue
            if earlier := self._earlier(chunk):
                sums[i] += torch.stack(earlier).sum(0)
            finished.append(i)
            totals.append(max(1.0, self._total(chunk.sequence)))
        if len(finished) < len(cursor.chunks):
            sums = sums.index_select(0, to_device(np.array(finished, dtype=np.int64), sums.device))
        return self._finish(sums / to_device(np.array(totals, dtype=np.float32), sums.device)[:, None])

    def _weights(
        self, rows: NDArray[np.int64], owner: NDArray[np.int64], cursor: PoolingCursor
    ) -> NDArray[np.int64] | None:
        """The weights of `rows`; row i is in chunk `owner[i]`. None if all count alike."""
        return None

    def _total(self, sequence: TokenSequence) -> float:
        """The sum of a whole sequence's weights."""
        pooled = sequence.tokens.pooled_positions
        return len(sequence) if pooled is None else len(pooled)


class WeightedMeanPool(MeanPool, name="weighted-mean", mode="weightedmean"):
    """The mean of the pooled rows, each weighted by its position, counted from 1.

    Source: SGPT, Muennighoff 2022 (arXiv 2202.08904)."""

    def _weights(
        self, rows: NDArray[np.int64], owner: NDArray[np.int64], cursor: PoolingCursor
    ) -> NDArray[np.int64]:
        first = np.array([chunk.start for chunk in cursor.chunks]) - np.array(cursor.starts)
        return rows + first[owner] + 1 if len(rows) else rows

    def _total(self, sequence: TokenSequence) -> float:
        pooled = sequence.tokens.pooled_positions
        return float(((np.arange(len(sequence)) if pooled is None else pooled) + 1).sum())


class MeanSqrtLenPool(MeanPool, name="mean-sqrt-len", mode="mean_sqrt_len_tokens"):
    """The sum of the pooled rows, divided by the square root of their number."""

    def _total(self, sequence: TokenSequence) -> float:
        return math.sqrt(super()._total(sequence))


class ConcatenatedPool(_OneVectorPool):
    """The vectors of several methods, concatenated: [1, methods * dim] per sequence."""

    def __init__(self, head: Head, methods: Sequence[type[PoolingMethod]]) -> None:
        super().__init__(head)
        self._methods = [method(torch.nn.Identity()) for method in methods]

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        return self._finish(
            torch.cat([method.pool(hidden, cursor).values for method in self._methods], dim=-1)
        )

    def free(self, sequence_id: int) -> None:
        for method in self._methods:
            method.free(sequence_id)

    @property
    def num_states(self) -> int:
        return sum(method.num_states for method in self._methods)


# The task whose items are one vector per passage, of models that pool a text by its mean.
PASSAGES = "embed_passages"


class PassageMeanPool(PoolingMethod):
    """Late chunking: the text is read as a whole, and the vector of a passage is the mean of its rows, summed
    in float32: [passages, dim] per sequence, in the order of its payload's `passages`. The state of a chunk
    is the indices of its passages and their sums.

    Source: Günther, Mohr, Williams, Wang & Xiao 2024, "Late Chunking: Contextual Chunk Embeddings Using
    Long-Context Embedding Models" (arXiv 2409.04701)."""

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        rows, lengths = cursor.pooled_rows()
        firsts = offsets_of(lengths)
        inside = [
            _inside(chunk, count, int(first))
            for chunk, count, first in zip(cursor.chunks, lengths, firsts, strict=False)
        ]
        sums = _summed(hidden, rows, inside)
        finished, counts = [], []
        for chunk, (passages, _, _), here in zip(cursor.chunks, inside, sums, strict=True):
            if not chunk.is_last:
                self._keep(chunk, (passages, here.clone()))
                continue
            spans = _passages(chunk)
            whole = torch.zeros(len(spans), hidden.shape[-1], device=hidden.device, dtype=torch.float32)
            for indices, part in [*self._earlier(chunk), (passages, here)]:
                whole.index_add_(0, to_device(indices, hidden.device), part)
            num_tokens = (spans[:, 1] - spans[:, 0]).astype(np.float32)
            finished.append(whole / to_device(num_tokens, hidden.device)[:, None])
            counts.append(len(spans))
        means = torch.cat([hidden.new_zeros(0, hidden.shape[-1], dtype=torch.float32), *finished])
        return Ragged.from_lengths(self.head(means), counts)


def _passages(chunk: Chunk) -> NDArray[np.int64]:
    passages = chunk.sequence.payload.passages
    assert passages is not None
    return passages


def _inside(
    chunk: Chunk, count: int, first: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The passages in a chunk with `count` pooled tokens: their indices, and where their tokens in the chunk
    start and stop, counted in the step, in which the chunk's tokens start at `first`."""
    pooled = chunk.sequence.tokens.pooled_positions
    before = chunk.start if pooled is None else int(np.searchsorted(pooled, chunk.start))
    bounds = np.clip(_passages(chunk) - before, 0, count) + first
    there = np.flatnonzero(bounds[:, 1] > bounds[:, 0])
    return there, bounds[there, 0], bounds[there, 1]


def _summed(
    hidden: torch.Tensor,
    rows: NDArray[np.int64],
    inside: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]],
) -> list[torch.Tensor]:
    """The sums [passages, hidden] of the passages `inside` each chunk."""
    starts, stops = (np.concatenate([part[i] for part in inside]) for i in (1, 2))
    lengths = stops - starts
    offsets = offsets_of(lengths)
    members = rows[np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    sums = torch.zeros(len(lengths), hidden.shape[-1], device=hidden.device, dtype=torch.float32)
    # Passages may overlap. At most as many rows as the step has are copied at a time.
    most = max(len(hidden), TILE)
    for first in range(0, len(members), most):
        together = slice(first, first + most)
        sums.index_add_(0, to_device(owner[together], hidden.device), take_rows(hidden, members[together]))
    return list(sums.split([len(part[0]) for part in inside]))
