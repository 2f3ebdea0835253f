"""What preprocessing makes of a request, and how its values become scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.requests import Usage, Value
from maxsimd.scheduler import CachedBatch
from maxsimd.scheduler import Sequence as TokenSequence

# From the values of a request's sequences, by index, to one score a document, float32.
Combine: TypeAlias = Callable[[list[Value]], NDArray[np.float32]]


def one_each(values: list[Value]) -> NDArray[np.float32]:
    """The values are the scores."""
    return np.array(values, dtype=np.float32)


def best_of(windows: Sequence[int], position_of: Sequence[int] | None = None) -> Combine:
    """The best of each document's windows; `windows` says how many each of the different documents has, and
    `position_of` for each document of the request which of these it is (None where all differ)."""
    starts = np.concatenate([[0], np.cumsum(windows)[:-1]]).astype(np.int64)
    inverse = None
    if position_of is not None and len(set(position_of)) < len(position_of):
        inverse = np.array(position_of)

    def combine(values: list[Value]) -> NDArray[np.float32]:
        scores = one_each(values)
        if len(starts) < len(scores):
            scores = np.maximum.reduceat(scores, starts)
        return scores if inverse is None else scores[inverse]

    return combine


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The sequences of a request, queries first, and the documents whose embeddings are cached.

    These end in `results` values, out of which `combine` makes the scores of a score request. `truncated`
    counts the inputs that were cut."""

    sequences: list[TokenSequence]
    results: int
    truncated: int
    combine: Combine = one_each
    cached: list[CachedBatch] = field(default_factory=list)

    @property
    def num_new_tokens(self) -> int:
        """Tokens to be run."""
        return sum(sequence.num_new_tokens for sequence in self.sequences)

    @property
    def work(self) -> int:
        """Tokens to be run, and cached documents at their price in tokens."""
        return self.num_new_tokens + sum(batch.price for batch in self.cached)


def usage_of(prepared: Prepared) -> Usage:
    """What a request used, in tokens."""
    whole = sum(len(sequence) for sequence in prepared.sequences if not sequence.is_prefix)
    documents = [document for batch in prepared.cached for document in batch.documents]
    whole += sum(document.embedding.tokens for document in documents)
    return Usage(whole, whole - prepared.num_new_tokens, len(documents))
