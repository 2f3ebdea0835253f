"""What preprocessing makes of a request, and how its values become scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.requests import Usage, Value
from maxsimd.engine.scoring.documents import KeptDocument
from maxsimd.scheduler import Role
from maxsimd.scheduler import Sequence as TokenSequence

# From the values of a request's sequences, by index, to one score a document, float32.
Combine: TypeAlias = Callable[[list[Value]], NDArray[np.float32]]


def one_each(values: list[Value]) -> NDArray[np.float32]:
    """The values are the scores."""
    return np.array(values, dtype=np.float32)


def best_of(windows: Sequence[int], place_of: Sequence[int] | None = None) -> Combine:
    """The best of each document's windows; `windows` says how many each document has, and `place_of` for each
    of the request's documents which of these it is."""
    starts = np.concatenate([[0], np.cumsum(windows)[:-1]]).astype(np.int64)
    places = None if place_of is None or len(set(place_of)) == len(place_of) else np.array(place_of)

    def combine(values: list[Value]) -> NDArray[np.float32]:
        scores = one_each(values)
        if len(starts) < len(scores):
            scores = np.maximum.reduceat(scores, starts)
        return scores if places is None else scores[places]

    return combine


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The sequences of a request, queries first, and the documents that need not be run.

    These end in `results` values, out of which `combine` makes the scores of a score request. `truncated`
    counts the inputs that were cut."""

    sequences: list[TokenSequence]
    results: int
    truncated: int
    combine: Combine = one_each
    kept: list[KeptDocument] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens to be run."""
        return sum(sequence.to_run for sequence in self.sequences)


def usage_of(prepared: Prepared) -> Usage:
    """What a request used, in tokens."""
    whole = sum(len(sequence) for sequence in prepared.sequences if sequence.role is not Role.PREFIX)
    whole += sum(document.embedding.tokens for document in prepared.kept)
    return Usage(whole, whole - prepared.tokens, len(prepared.kept))
