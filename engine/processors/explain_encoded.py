"""Explanations where queries and documents are run apart: which tokens match, and the scores of windows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Explanation, TokenMatch, WindowScore
from maxsimd.engine.processors.documents import Documents
from maxsimd.engine.processors.explain_limits import check_lines, check_mapped, check_noted
from maxsimd.engine.processors.patches import maps_of, patch_of
from maxsimd.engine.processors.text.origins import Origins
from maxsimd.engine.processors.text.texts import TextBuilder
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import Item, ScoreRequest, Values
from maxsimd.engine.scoring.matches import matches_of, similarities_of
from maxsimd.engine.scoring.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.scheduler import Explained

# No more characters of a token are shown: some tokenisers make one of any long word. Its span has all.
_MOST_SHOWN = 100


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The texts of one field, by what their sequences are built, and the rows that were looked up last."""

    texts: Sequence[Item]
    builder: TextBuilder
    last: dict[int, list[Origins]] = field(default_factory=dict)

    def text(self, index: int) -> str | None:
        """None for what came as its embedding, or is a picture."""
        text = self.texts[index]
        return text if isinstance(text, str) else None

    def rows(self, index: int, as_document: bool) -> list[Origins]:
        text = self.text(index)
        if text is None:
            return []
        if index not in self.last:
            yield_to_smaller()
            builder = self.builder
            found = builder.window_origins(text, index) if as_document else [builder.origins(text, index)]
            self.last.clear()
            self.last[index] = found
        return self.last[index]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedExplainer:
    """Explains documents of one request. The values of different document i begin at `first_values[i]`: one
    with matches behind the score, or one for each part of a long query; or, for vectors of whole texts, the
    scores of its windows. With `is_mean` scores are the mean of similarities, not their sum."""

    request: ScoreRequest
    queries: Side
    documents: Side
    read: Documents
    tokenizer: TextTokenizer
    first_values: Sequence[int]
    is_mean: bool
    # By their positions: equal documents share one.
    explained: dict[int, Explanation] = field(default_factory=dict)

    def __call__(self, values: Values, index: int) -> Explanation | None:
        """The explanation of document `index` of the request; None where it has no score."""
        position = self.read.position_of[index]
        if position not in self.explained:
            made = self._explain(values, index, position)
            if made is None:
                return None
            self.explained[position] = made
        return self.explained[position]

    def _explain(self, values: Values, index: int, position: int) -> Explanation | None:
        document = self.read.different[position]
        first = self.first_values[position]
        value = values.values[first]
        maps: tuple[NDArray[np.float32], ...] = ()
        if isinstance(value, np.ndarray):
            rows = document.window_rows
            tokens = document.tokens_of_page
            how = Explained(rows, with_map=self.request.maps and tokens is not None)
            # One for each part of a long query.
            parts = values.values[first : self.first_values[position + 1]]
            if any(part is None for part in parts):
                return None
            found = np.concatenate([matches_of(np.asarray(part), how) for part in parts])
            if tokens is not None and how.with_map:
                similarities = [similarities_of(np.asarray(part), how) for part in parts]
                maps = maps_of(tokens, np.concatenate(similarities))
            sums = found[:, :, 1].sum(axis=0, dtype=np.float64) / (len(found) if self.is_mean else 1)
            # A window without a vector has the score of an empty document.
            scores = np.where(np.array(rows) > 0, sums, EMPTY_DOCUMENT_SCORE).tolist()
            matches = self._matches(index, _best_of_windows(found))
        else:
            scores = values.values[first : first + document.num_consumers]
            matches = ()
        if None in scores:
            return None
        windows = self._windows(index, scores)
        return Explanation(document.tokens, document.truncated, document.is_cached, matches, windows, maps)

    def _windows(self, index: int, scores: Sequence[float]) -> tuple[WindowScore, ...]:
        """None of a document that is one sequence."""
        if len(scores) < 2:
            return ()
        extents = [origins.extent for origins in self.documents.rows(index, as_document=True)]
        return tuple(
            WindowScore(extent or (0, 0), score) for extent, score in zip(extents, scores, strict=True)
        )

    def _matches(self, index: int, best: NDArray[np.float32]) -> tuple[TokenMatch, ...]:
        """The matches of a document, of which `best` [Lq, 2] has the row of each and its similarity."""
        if len(best) == 0 or (best[:, 0] < 0).any():
            return ()
        asked = self.request.query_of(index)
        query, document = self.queries.text(asked), self.documents.text(index)
        query_rows = self.queries.rows(asked, as_document=False)
        document_rows = self.documents.rows(index, as_document=True)
        page = self.read.different[self.read.position_of[index]].tokens_of_page
        of_query = Origins.join(query_rows) if query_rows else None
        of_document = Origins.join(document_rows) if document_rows else None
        total = float(best[:, 1].sum(dtype=np.float64))
        matches = []
        for i, (row, similarity) in enumerate(best.tolist()):
            query_token, query_span = self._token(of_query, i, query)
            token, span = self._token(of_document, int(row), document)
            share = similarity / total if total else 0.0
            patch = None if page is None else patch_of(page, int(row))
            matches.append(
                TokenMatch(query_token, query_span, token, span, int(row), similarity, share, patch)
            )
        return tuple(matches)

    def _token(
        self, origins: Origins | None, row: int, text: str | None
    ) -> tuple[str | None, tuple[int, int] | None]:
        """A token as it is written in its text, or as the vocabulary has it, and its span."""
        if origins is None or text is None:
            return None, None
        span = origins.span(row, text)
        if span is None:
            return self.tokenizer.token(int(origins.ids[row])), None
        start, stop = span
        return text[start : min(stop, start + _MOST_SHOWN)], span


def _best_of_windows(found: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each query token [Lq, windows, 2] the best window's match, [Lq, 2]."""
    there = np.where(found[:, :, 0] < 0, -np.inf, found[:, :, 1])
    best: NDArray[np.float32] = found[np.arange(len(found)), there.argmax(axis=1)]
    return best


def check_explained(request: ScoreRequest, read: Documents, query_rows: NDArray[np.int64] | None) -> None:
    """Refuses a request whose explanations would be too much. `query_rows` says how many vectors the query of
    each document has, where they are matched."""
    windows = [len(each.window_rows) for each in read.different]
    of_each = [windows[position] for position in read.position_of]
    rows = [0] * len(of_each) if query_rows is None else query_rows.tolist()
    check_lines(
        request.explain, (row + (count if count > 1 else 0) for row, count in zip(rows, of_each, strict=True))
    )
    if query_rows is not None and request.maps:
        of_pages = [0 if each.tokens_of_page is None else sum(each.window_rows) for each in read.different]
        check_mapped(row * of_pages[position] for row, position in zip(rows, read.position_of, strict=True))
    if query_rows is not None:
        # Of equal documents, which have one position, the query is the same.
        rows_of = dict(zip(read.position_of, rows, strict=True))
        check_noted([rows_of[position] for position in range(len(windows))], windows)


def check_can_be_explained(token_pooling: object | None) -> None:
    """Refuses to explain the scores of a model that merges vectors: they stand for no token."""
    if token_pooling is not None:
        raise InvalidRequestError(
            "explain is not possible: this model's vectors of documents are merged (token pooling) and stand "
            "for no single token; leave it out",
            "explain",
        )
