"""Explanations of scores. Spans are start and end in Unicode code points of the scored text."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Patch:
    """A part of a picture: its row and column in the model's grid, and its box (left, top, right, bottom) in
    pixels of the upright picture. `picture` is the picture's index in the document."""

    row: int
    column: int
    box: tuple[int, int, int, int]
    picture: int = 0


@dataclass(frozen=True, slots=True)
class TokenMatch:
    """A query token and the most similar document token, by dot product. `share` is its part of the sum over
    the query's tokens.

    Tokens show at most 100 characters; their spans have all. Markers and expansion tokens have no span.
    Embeddings have neither token nor span; `document_row` is the index of the document's vector. In a picture
    the document token is a `patch`, or None for tokens beside it."""

    query_token: str | None
    query_span: Span | None
    document_token: str | None
    document_span: Span | None
    document_row: int
    similarity: float
    share: float
    patch: Patch | None = None


@dataclass(frozen=True, slots=True)
class WindowScore:
    """A window of a long document, and the document's score by this window alone."""

    span: Span
    score: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a document's score.

    `tokens` is the number of its tokens, with the query's if both are read together, 0 for embeddings.
    `truncated` says whether the document was truncated, `cached` whether its embedding or score came from the
    cache. `matches` are for late interaction, one per query vector: MaxSim is the sum of their similarities.
    `windows` are for documents that were read through windows. `maps` are for documents with pictures, if
    requested: per picture the similarity of each query vector to each patch, float32 [query vectors, rows,
    columns], NaN for patches that take no part. `read_span` has the characters that were read of a truncated
    document; None for others, and for pairs whose score came from the cache."""

    tokens: int
    truncated: bool
    cached: bool
    matches: tuple[TokenMatch, ...] = ()
    windows: tuple[WindowScore, ...] = ()
    maps: tuple[NDArray[np.float32], ...] = ()
    read_span: Span | None = None

    @property
    def passage(self) -> WindowScore | None:
        """The best window; the first of equally good ones."""
        return max(self.windows, key=lambda window: window.score, default=None)
