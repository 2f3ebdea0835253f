"""What preprocessing makes of a request, and how its values become scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.messages import Value
from maxsimd.scheduler import Sequence as TokenSequence

# From the values of a request's sequences, by index, to one score a document, float32.
Combine: TypeAlias = Callable[[list[Value]], NDArray[np.float32]]


def one_each(values: list[Value]) -> NDArray[np.float32]:
    """The values are the scores."""
    return np.array(values, dtype=np.float32)


def best_of(windows: Sequence[int]) -> Combine:
    """The best of each document's windows; `windows` says how many each document has."""
    starts = np.concatenate([[0], np.cumsum(windows)[:-1]]).astype(np.int64)

    def combine(values: list[Value]) -> NDArray[np.float32]:
        return np.maximum.reduceat(one_each(values), starts)

    return combine if any(count > 1 for count in windows) else one_each


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The sequences of a request, queries first; `results` of them end in a result, out of which `combine`
    makes the scores of a score request. `truncated` counts the inputs that were cut."""

    sequences: list[TokenSequence]
    results: int
    truncated: int
    combine: Combine = one_each

    @property
    def tokens(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)
