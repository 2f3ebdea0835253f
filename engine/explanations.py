"""Why a document has its score: what the engine tells of a result beside it.

Spans are the first character and the one after the last, counted in Unicode code points of the text that was
scored."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Patch:
    """Part of a picture: its row and column in the grid of what the model reads of it, and its box (left,
    top, right, bottom) in pixels of the upright picture. `picture` says which of the document's it is."""

    row: int
    column: int
    box: tuple[int, int, int, int]
    picture: int = 0


@dataclass(frozen=True, slots=True)
class TokenMatch:
    """A token of the query and the token of the document that is most like it, by the dot product of their
    vectors; `share` is its part of the sum of these over the query's tokens.

    Of a token at most 100 characters are here; its span has all. Tokens that stand for no characters, markers
    and expansion, have no span. Of a text that came as its embedding neither token nor span is there, but
    `document_row` says which vector of the document it is. In a picture it is a `patch`, or None where it is
    one of the tokens that stand beside it."""

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
    """A window of a long document, and the score that the document has by this window alone."""

    span: Span
    score: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a document came to its score.

    `tokens` is how many the model reads of it, with the query where both are read together, 0 for an
    embedding that came along. `truncated` says whether the document was cut, and `cached` whether its
    embedding or its score was in the cache, and none of the tokens were run. `matches` are there for late
    interaction, one for each of the query's vectors: MaxSim is the sum of their similarities. `windows` are
    there for documents that were read through windows. `maps` are there for documents with pictures, if they
    were asked for: of each picture the similarity of each of the query's vectors to each patch, float32
    [query vectors, rows, columns], NaN for patches that take no part."""

    tokens: int
    truncated: bool
    cached: bool
    matches: tuple[TokenMatch, ...] = ()
    windows: tuple[WindowScore, ...] = ()
    maps: tuple[NDArray[np.float32], ...] = ()

    @property
    def passage(self) -> WindowScore | None:
        """The best window, the first of those that are equally good."""
        return max(self.windows, key=lambda window: window.score, default=None)
