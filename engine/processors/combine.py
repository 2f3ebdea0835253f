"""From the values of a request's sequences to one score a document.

Run on the event loop, so all that can be computed beforehand is a field.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.requests import Value

Scores: TypeAlias = NDArray[np.float32]

# From the values of a request's sequences, by index, to one score a document, float32. Where one of those
# that make up a score is NaN, so is the score.
Combine: TypeAlias = Callable[[list[Value]], Scores]


def one_each(values: list[Value]) -> Scores:
    """The values are the scores."""
    return np.array(values, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class BestWindow:
    """The score of a document is that of its best window. The windows of document i begin at value
    `starts[i]` and end where those of the next document begin."""

    starts: NDArray[np.int64]

    def __call__(self, values: list[Value]) -> Scores:
        return np.asarray(np.maximum.reduceat(one_each(values), self.starts))


@dataclass(frozen=True, slots=True, eq=False)
class SummedParts:
    """The score of a document is the sum of its parts, one for each part of the query. Those of document i
    begin at value `starts[i]` and end where those of the next document begin."""

    starts: NDArray[np.int64]

    def __call__(self, values: list[Value]) -> Scores:
        return np.add.reduceat(np.array(values, dtype=np.float64), self.starts).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class FirstNumbers:
    """Of values that have a score and its matches behind it, `scores` gets the score alone."""

    scores: Combine

    def __call__(self, values: list[Value]) -> Scores:
        return self.scores(
            [float(value.flat[0]) if isinstance(value, np.ndarray) else value for value in values]
        )


@dataclass(frozen=True, slots=True)
class NoScores:
    """No document has a score."""

    num_documents: int

    def __call__(self, values: list[Value]) -> Scores:
        return np.full(self.num_documents, np.nan, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class SharedScores:
    """Documents that are equal share a score: `scores` makes those of the different documents, and document
    i of the request has score `position_of[i]` of these."""

    scores: Combine
    position_of: NDArray[np.int64]

    def __call__(self, values: list[Value]) -> Scores:
        return self.scores(values)[self.position_of]


@dataclass(frozen=True, slots=True)
class BlockCosines:
    """The cosine of each document with its query, from the blocks of a listwise model: `num_blocks[i]` blocks
    in a row are list i, a query and the documents that are ranked together for it."""

    num_blocks: tuple[int, ...]

    def __call__(self, values: list[Value]) -> Scores:
        blocks = iter(values)
        return np.concatenate(
            [merge_blocks([np.asarray(next(blocks)) for _ in range(count)]) for count in self.num_blocks]
        )


def best_windows(num_windows: Sequence[int]) -> Combine:
    """The best window of each document, of which document i has `num_windows[i]`."""
    if all(count == 1 for count in num_windows):
        return one_each
    return BestWindow(np.cumsum([0, *num_windows[:-1]]))


def summed_parts(num_parts: Sequence[int]) -> Combine:
    """The sum of each document's parts, of which document i has `num_parts[i]`."""
    if all(count == 1 for count in num_parts):
        return one_each
    return SummedParts(np.cumsum([0, *num_parts[:-1]]))


def shared_scores(scores: Combine, position_of: Sequence[int]) -> Combine:
    """`scores` of different documents, for a request whose document i is number `position_of[i]` of these."""
    if len(set(position_of)) == len(position_of):
        return scores
    return SharedScores(scores, np.array(position_of))


def merge_blocks(blocks: Sequence[NDArray[np.float32]]) -> Scores:
    """Scores of all documents of one query: the cosine of each with the query.

    A block is float32 [documents + 1, dim], the query last. The query is the mean of what it is in each,
    weighted by the block's best cosine, mapped to 0 to 1."""
    documents = [_unit(block[:-1]) for block in blocks]
    weights = [
        float((1 + unit @ _unit(block[-1])).max() / 2) for unit, block in zip(documents, blocks, strict=True)
    ]
    query = np.average([block[-1] for block in blocks], axis=0, weights=weights)
    return np.concatenate(documents) @ _unit(query).astype(np.float32)


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    norm = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.maximum(norm, 1e-12))
