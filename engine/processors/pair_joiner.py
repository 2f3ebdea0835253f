"""What the ways to put a query and a document together have in common."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from maxsimd.engine.explanations import Span
from maxsimd.engine.processors.text.long_inputs import Fitted, LongInputs
from maxsimd.engine.requests import ScoreRequest
from maxsimd.scheduler import JoinedTokens, Tokens
from maxsimd.scheduler.payload import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class JoinedPair:
    """A query and a document in one sequence, or in one for each window of the document.

    `prefix` is what stands before the document in all pairs of the query; a pair whose document merges with
    it begins otherwise. `truncated` says whether the document, or the query for its sake, was cut. The
    pictures of a pair have no ids yet."""

    windows: Sequence[JoinedTokens | Tokens]
    prefix: TokenIds
    truncated: bool


class PairJoiner(Protocol):
    """Puts queries and documents together as one model reads them. Thread-safe."""

    def join(
        self, request: ScoreRequest, queries: list[Fitted[np.int32]], long_inputs: LongInputs
    ) -> Iterator[JoinedPair]:
        """The pairs of a request in the order of its documents; `queries` are its queries' tokens."""
        ...

    def window_spans(
        self, request: ScoreRequest, index: int, query_tokens: int, long_inputs: LongInputs
    ) -> list[Span]:
        """The characters of each window through which document `index` is read, with a query of
        `query_tokens` tokens."""
        ...

    def shortest_pair(self) -> int:
        """How many tokens the shortest pair has."""
        ...
