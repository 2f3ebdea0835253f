"""Explanations of scores. Spans are start and end in Unicode code points of the scored text."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine import display

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    `windows` are for documents that were read through windows. With `explain="maps"`, late interaction has
    similarities too. For documents with pictures, `maps` has per picture the similarity of each query vector
    to each patch, float32 [query vectors, rows, columns], NaN for patches that take no part. For others,
    `similarities` has that of each query vector to each vector of the document, float32 [query vectors,
    document vectors], and `document_tokens` the document's tokens in that order.
    `read_span` has the characters that were read of a truncated document, if they are known: not for scores
    from the cache, listwise models, and pairs that are truncated at one end."""

    tokens: int
    truncated: bool
    cached: bool
    matches: tuple[TokenMatch, ...] = ()
    windows: tuple[WindowScore, ...] = ()
    maps: tuple[NDArray[np.float32], ...] = ()
    read_span: Span | None = None
    similarities: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    document_tokens: tuple[str | None, ...] = field(default=(), repr=False)

    @property
    def num_similarities(self) -> int:
        own = 0 if self.similarities is None else self.similarities.size
        return own + sum([each.size for each in self.maps])

    @property
    def passage(self) -> WindowScore | None:
        """The best window; the first of equally good ones."""
        return max(self.windows, key=lambda window: window.score, default=None)

    def plot(self, ax: "Axes | None" = None, *, title: str = "") -> "Axes":
        """Draws the similarity of each query token to each document token as a heat map. A dot marks the best
        match of each query token: MaxSim is the sum of these.

        Needs matplotlib, and a text that late interaction has scored with `explain="maps"`.

        Args:
            ax: matplotlib's axes to draw on. None makes a new figure. Default: None.
            title: Title of the map. Default: "".

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: There are no similarities to draw.
        """
        if self.similarities is None or not self.similarities.size:
            raise ValueError(
                "there are no similarities of tokens to draw; use a late-interaction model, "
                'explain="maps" and a document of text'
            )
        query_tokens = [match.query_token for match in self.matches]
        rows, columns = (
            [str(i) if token is None else token for i, token in enumerate(tokens)]
            for tokens in (query_tokens, self.document_tokens)
        )
        return display.heat_map(self.similarities, rows, columns, title, ax)
