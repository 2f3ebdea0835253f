"""Explanations of scores. Spans are start and end in Unicode code points of the scored text."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Span: TypeAlias = tuple[int, int]


def _about(description: str, *examples: Any) -> msgspec.Meta:
    """How the HTTP reference describes a field."""
    return msgspec.Meta(description=description, examples=list(examples) or None)


@dataclass(frozen=True, slots=True)
class Patch:
    """A part of a picture: its row and column in the model's grid, and its box (left, top, right, bottom) in
    pixels of the upright picture. `picture` is the picture's index in the document."""

    row: Annotated[int, _about("Row in the model's grid.", 3)]
    column: Annotated[int, _about("Column in the model's grid.", 5)]
    box: Annotated[
        tuple[int, int, int, int], _about("Left, top, right and bottom, in pixels.", [140, 84, 168, 112])
    ]
    picture: Annotated[int, _about("Place of the picture in the document, from 0.", 0)] = 0


@dataclass(frozen=True, slots=True)
class TokenMatch:
    """A query token and the most similar document token, by dot product. `share` is its part of the sum over
    the query's tokens.

    Tokens show at most 100 characters; their spans have all. Markers and expansion tokens have no span.
    Embeddings have neither token nor span; `document_row` is the index of the document's vector. In a picture
    the document token is a `patch`, or None for tokens beside it."""

    query_token: Annotated[str | None, _about("Token of the query; null for vectors.", "capital")]
    query_span: Annotated[
        Span | None, _about("Its first character and the one after the last; null for markers.", [12, 19])
    ]
    document_token: Annotated[str | None, _about("Most similar token of the document.", "capital")]
    document_span: Annotated[Span | None, _about("Its place in the document.", [13, 20])]
    document_row: Annotated[int, _about("Index of the document's vector.", 4)]
    similarity: Annotated[float, _about("Dot product of the two vectors.", 0.9597)]
    share: Annotated[float, _about("Part of the score.", 0.1278)]
    patch: Annotated[Patch | None, _about("Part of a picture, in place of a token.")] = None


@dataclass(frozen=True, slots=True)
class WindowScore:
    """A window of a long document, and the document's score by this window alone."""

    span: Annotated[Span, _about("First character of the window and the one after the last.", [0, 1800])]
    score: Annotated[float, _about("Score of the document by this window alone.", 6.1)]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a document's score.

    `tokens` is the number of its tokens, with the query's if both are read together, 0 for embeddings.
    `truncated` says whether the document was truncated, `cached` whether its embedding or score came from the
    cache. `matches` are for late interaction, one per query vector: MaxSim is the sum of their similarities.
    `windows` are for documents that were read through windows. `maps` are for documents with pictures, if
    requested: per picture the similarity of each query vector to each patch, float32 [query vectors, rows,
    columns], NaN for patches that take no part."""

    tokens: int
    truncated: bool
    cached: bool
    matches: tuple[TokenMatch, ...] = ()
    windows: tuple[WindowScore, ...] = ()
    maps: tuple[NDArray[np.float32], ...] = ()

    @property
    def passage(self) -> WindowScore | None:
        """The best window; the first of equally good ones."""
        return max(self.windows, key=lambda window: window.score, default=None)
