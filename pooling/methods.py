"""The pooling methods: from the rows of a step's chunks to one item per finished sequence.

Each method handles its whole group at once and keeps what it needs of sequences that are still in prefill.
Which method a sequence takes, and what is done with the item, is decided elsewhere.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.ragged import Ragged, offsets_of, to_device
from maxsimd.scheduler import Chunk, TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class PoolingCursor:
    """The chunks of a step and the row at which each begins: chunk i is `hidden[starts[i]:][:len(chunk)]`.

    Rows between two chunks, if any, are padding and mean nothing.
    """

    chunks: tuple[Chunk, ...]
    starts: tuple[int, ...]

    def select(self, wanted: Callable[[Chunk], bool]) -> "PoolingCursor":
        """The cursor of those chunks alone."""
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
    """A head that can take rows from where they lie."""

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def gather(self, hidden: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """What it makes of `hidden[rows]`: [len(rows), dim], in a precision of its own."""


# All pooling methods by name, whatever their task; a class adds itself.
METHODS: dict[str, type["PoolingMethod"]] = {}
# The names of those that sentence-transformers has, by its `pooling_mode`.
MODES: dict[str, str] = {}
# Stands between the names of methods whose rows are concatenated.
CONCATENATED = "+"


class PoolingMethod(ABC):
    """Pools sequences, whole or in chunks, and owns the state of those that are not finished.

    `head` maps rows [n, hidden] to [n, dim] (projection, classifier, normalisation), in float32.
    """

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

    @abstractmethod
    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        """Pools one step's group.

        `hidden` is [rows, hidden]; the result has an item for each chunk of the cursor that is its
        sequence's last, in the cursor's order. Calling it twice with the same cursor has the effect of
        calling it once, so that a step may be retried.
        """

    def comparable(self, item: torch.Tensor) -> torch.Tensor:
        """An item [n, dim] in a form in which it can be compared, number by number, with one that was rounded
        otherwise."""
        return item

    @abstractmethod
    def free(self, sequence_id: int) -> None:
        """Forgets the state of a sequence, if there is any."""

    @property
    @abstractmethod
    def num_states(self) -> int:
        """How many unfinished sequences have state here."""


class AllPool(PoolingMethod, name="all"):
    """The row of every token that is pooled, already projected: [tokens, dim] a sequence.

    The head is applied to the whole step's rows, on a CPU tile by tile, which stay in its cache; the
    chunks of one sequence are held projected.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._chunks: dict[int, dict[int, torch.Tensor]] = {}

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        rows, lengths = cursor.pooled_rows()
        projected = Ragged.from_lengths(self._project(hidden, rows), lengths)
        if all(chunk.is_whole for chunk in cursor.chunks):
            return projected
        finished = []
        for chunk, part in zip(cursor.chunks, projected, strict=True):
            sequence_id = chunk.sequence.sequence_id
            if not chunk.is_last:
                # A clone, so that one chunk does not hold the step's whole tensor alive.
                self._chunks.setdefault(sequence_id, {})[chunk.start] = part.clone()
            elif chunk.is_first:
                finished.append(part)
            else:
                earlier = self._chunks[sequence_id]
                finished.append(torch.cat([earlier[start] for start in sorted(earlier)] + [part]))
        return Ragged.from_items(finished) if finished else Ragged(projected.values[:0], (0,))

    def _project(self, hidden: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        if isinstance(self.head, GatheringHead):
            return self.head.gather(hidden, rows)
        if hidden.device.type != "cpu" or len(rows) <= TILE:
            return self.head(take_rows(hidden, rows))
        return torch.cat(
            [self.head(take_rows(hidden, rows[first : first + TILE])) for first in range(0, len(rows), TILE)]
        )

    def free(self, sequence_id: int) -> None:
        self._chunks.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._chunks)


class _OneRowPool(PoolingMethod):
    """Common ground of the methods that make one vector of a sequence."""

    def _finish(self, pooled: torch.Tensor) -> Ragged:
        vectors = self.head(pooled)
        return Ragged.one_row_each(vectors)


class ClsPool(_OneRowPool, name="cls", mode="cls"):
    """The first token's row: [1, dim] a sequence."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._first_rows: dict[int, torch.Tensor] = {}

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        first = [
            (chunk, row) for chunk, row in zip(cursor.chunks, cursor.starts, strict=True) if chunk.is_first
        ]
        rows = take_rows(hidden, np.array([row for _, row in first], dtype=np.int64))
        if len(first) == len(cursor.chunks) and all(chunk.is_last for chunk, _ in first):
            return self._finish(rows)
        here = {chunk.sequence.sequence_id: row for (chunk, _), row in zip(first, rows, strict=True)}
        finished = []
        for chunk in cursor.chunks:
            sequence_id = chunk.sequence.sequence_id
            if not chunk.is_last:
                if chunk.is_first:
                    self._first_rows[sequence_id] = here[sequence_id].clone()
            else:
                finished.append(here[sequence_id] if chunk.is_first else self._first_rows[sequence_id])
        return self._finish(torch.stack(finished) if finished else rows[:0])

    def free(self, sequence_id: int) -> None:
        self._first_rows.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._first_rows)


class AfterPromptPool(_OneRowPool, name="cls-after-prompt"):
    """The row of the first token that is pooled, which the prompt's are not: [1, dim] a sequence."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._rows: dict[int, torch.Tensor] = {}

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        finished = []
        for chunk, start in zip(cursor.chunks, cursor.starts, strict=True):
            pooled = chunk.sequence.tokens.pooled_positions
            position = 0 if pooled is None else int(pooled[0])
            if chunk.start <= position < chunk.stop:
                row = hidden[start + position - chunk.start].float()
                if not chunk.is_last:
                    self._rows[chunk.sequence.sequence_id] = row.clone()
            if chunk.is_last:
                is_here = position >= chunk.start
                finished.append(row if is_here else self._rows[chunk.sequence.sequence_id])
        return self._finish(torch.stack(finished) if finished else hidden[:0].float())

    def free(self, sequence_id: int) -> None:
        self._rows.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._rows)


class MaxPool(_OneRowPool, name="max-pooling", mode="max"):
    """The greatest number of each column among the rows that are pooled: [1, dim] a sequence."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._greatest: dict[int, dict[int, torch.Tensor]] = {}

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        rows, lengths = cursor.pooled_rows()
        owner = np.repeat(np.arange(len(lengths)), lengths)
        found = torch.full((len(lengths), hidden.shape[-1]), -torch.inf, device=hidden.device)
        index = to_device(owner, hidden.device)[:, None].expand(-1, hidden.shape[-1])
        found.scatter_reduce_(0, index, take_rows(hidden, rows), "amax")
        finished = []
        for chunk, greatest in zip(cursor.chunks, found, strict=True):
            sequence_id = chunk.sequence.sequence_id
            if not chunk.is_last:
                self._greatest.setdefault(sequence_id, {})[chunk.start] = greatest.clone()
                continue
            earlier = self._greatest.get(sequence_id)
            finished.append(torch.stack([*earlier.values(), greatest]).amax(0) if earlier else greatest)
        return self._finish(torch.stack(finished) if finished else found[:0])

    def free(self, sequence_id: int) -> None:
        self._greatest.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._greatest)


class LastPool(_OneRowPool, name="last", mode="lasttoken"):
    """The row of the last token that is pooled: [1, dim] a sequence."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._last_rows: dict[int, torch.Tensor] = {}

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        having, rows = [], []
        for chunk, start in zip(cursor.chunks, cursor.starts, strict=True):
            pooled = chunk.sequence.tokens.pooled_positions
            last = len(chunk.sequence) - 1 if pooled is None else int(pooled[-1])
            if chunk.start <= last < chunk.stop:
                having.append(chunk)
                rows.append(start + last - chunk.start)
        taken = take_rows(hidden, np.array(rows, dtype=np.int64))
        finished = [chunk for chunk in cursor.chunks if chunk.is_last]
        if having == finished:
            return self._finish(taken)
        here = {chunk.sequence.sequence_id: row for chunk, row in zip(having, taken, strict=True)}
        for chunk in having:
            if not chunk.is_last:
                self._last_rows[chunk.sequence.sequence_id] = here[chunk.sequence.sequence_id].clone()
        keys = [chunk.sequence.sequence_id for chunk in finished]
        lasts = [here[key] if key in here else self._last_rows[key] for key in keys]
        return self._finish(torch.stack(lasts) if lasts else taken[:0])

    def free(self, sequence_id: int) -> None:
        self._last_rows.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._last_rows)


class MeanPool(_OneRowPool, name="mean", mode="mean"):
    """The mean of the rows that are pooled, summed in float32: [1, dim] a sequence.

    Between chunks it keeps the running sum of each, by the token at which the chunk began.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._sums: dict[int, dict[int, torch.Tensor]] = {}

    def pool(self, hidden: torch.Tensor, cursor: PoolingCursor) -> Ragged:
        rows, lengths = cursor.pooled_rows()
        owner = np.repeat(np.arange(len(lengths)), lengths)
        sums = torch.zeros(len(lengths), hidden.shape[-1], device=hidden.device)
        weighted = self._weighted(take_rows(hidden, rows), rows, owner, cursor)
        sums.index_add_(0, to_device(owner, hidden.device), weighted)
        finished, totals = [], []
        for i, chunk in enumerate(cursor.chunks):
            sequence_id = chunk.sequence.sequence_id
            if not chunk.is_last:
                self._sums.setdefault(sequence_id, {})[chunk.start] = sums[i].clone()
                continue
            earlier = self._sums.get(sequence_id)
            if earlier:
                sums[i] += torch.stack(list(earlier.values())).sum(0)
            finished.append(i)
            totals.append(max(1.0, self._total(chunk.sequence)))
        if len(finished) < len(cursor.chunks):
            sums = sums.index_select(0, to_device(np.array(finished, dtype=np.int64), sums.device))
        return self._finish(sums / to_device(np.array(totals, dtype=np.float32), sums.device)[:, None])

    def free(self, sequence_id: int) -> None:
        self._sums.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._sums)

    def _weighted(
        self,
        values: torch.Tensor,
        rows: NDArray[np.int64],
        owner: NDArray[np.int64],
        cursor: PoolingCursor,
    ) -> torch.Tensor:
        """The values of the pooled rows, each times its weight; row i is `rows[i]` of chunk `owner[i]`."""
        return values

    def _total(self, sequence: TokenSequence) -> float:
        """The sum of a whole sequence's weights."""
        pooled = sequence.tokens.pooled_positions
        return len(sequence) if pooled is None else len(pooled)


class WeightedMeanPool(MeanPool, name="weighted-mean", mode="weightedmean"):
    """The mean of the rows that are pooled, each weighted by its position, counted from 1.

    Source: SGPT, Muennighoff 2022 (arXiv 2202.08904)."""

    def _weighted(
        self,
        values: torch.Tensor,
        rows: NDArray[np.int64],
        owner: NDArray[np.int64],
        cursor: PoolingCursor,
    ) -> torch.Tensor:
        first = np.array([chunk.start for chunk in cursor.chunks]) - np.array(cursor.starts)
        positions = rows + first[owner] + 1 if len(rows) else rows
        return values * to_device(positions, values.device)[:, None]

    def _total(self, sequence: TokenSequence) -> float:
        pooled = sequence.tokens.pooled_positions
        return float(((np.arange(len(sequence)) if pooled is None else pooled) + 1).sum())


class MeanSqrtLenPool(MeanPool, name="mean-sqrt-len", mode="mean_sqrt_len_tokens"):
    """The sum of the rows that are pooled, divided by the square root of their number."""

    def _total(self, sequence: TokenSequence) -> float:
        return math.sqrt(super()._total(sequence))


class ConcatenatedPool(_OneRowPool):
    """The rows of several methods, one behind the other: [1, methods * dim] a sequence."""

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


# The task whose items are one vector a passage, of models that pool a whole text by its mean.
PASSAGES = "embed_passages"

# Of a sequence that is cut, what its earlier tokens add up to: passages, and their sums [passages, hidden].
_Partial = tuple[NDArray[np.int64], torch.Tensor]


class PassageMeanPool(PoolingMethod):
    """The mean of each passage's rows, summed in float32: [passages, dim] a sequence, in the order of its
    payload's `passages`.

    Between chunks it has the running sums of each, by the token at which the chunk began."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._sums: dict[int, dict[int, _Partial]] = {}

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
            sequence_id = chunk.sequence.sequence_id
            if not chunk.is_last:
                # A clone, so that one chunk does not hold the step's sums alive.
                self._sums.setdefault(sequence_id, {})[chunk.start] = passages, here.clone()
                continue
            spans = _passages(chunk)
            earlier = self._sums.get(sequence_id, {})
            whole = torch.zeros(len(spans), hidden.shape[-1], device=hidden.device)
            for indices, part in (*(earlier[start] for start in sorted(earlier)), (passages, here)):
                whole.index_add_(0, to_device(indices, hidden.device), part)
            num_tokens = (spans[:, 1] - spans[:, 0]).astype(np.float32)
            finished.append(whole / to_device(num_tokens, hidden.device)[:, None])
            counts.append(len(spans))
        means = torch.cat(finished) if finished else torch.zeros(0, hidden.shape[-1], device=hidden.device)
        return Ragged.from_lengths(self.head(means), counts)

    def free(self, sequence_id: int) -> None:
        self._sums.pop(sequence_id, None)

    @property
    def num_states(self) -> int:
        return len(self._sums)


def _passages(chunk: Chunk) -> NDArray[np.int64]:
    passages = chunk.sequence.payload.passages
    assert passages is not None
    return passages


def _inside(
    chunk: Chunk, count: int, first: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The passages that have any of a chunk's `count` pooled tokens, which are numbered from `first` on among
    those of the step: their indices, and where their tokens here begin and end."""
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
    """For each chunk the sums [passages, hidden] of the rows of the passages `inside` it."""
    starts, stops = (np.concatenate([part[i] for part in inside]) for i in (1, 2))
    lengths = stops - starts
    offsets = offsets_of(lengths)
    members = rows[np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    sums = torch.zeros(len(lengths), hidden.shape[-1], device=hidden.device)
    # Passages may share rows: no more of them are copied at a time than the step has.
    most = max(len(hidden), TILE)
    for first in range(0, len(members), most):
        together = slice(first, first + most)
        sums.index_add_(0, to_device(owner[together], hidden.device), take_rows(hidden, members[together]))
    return list(sums.split([len(part[0]) for part in inside]))
