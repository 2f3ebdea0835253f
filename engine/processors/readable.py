"""Prepares the documents of a score request that can be prepared, and finds out why the others cannot."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.combine import Combine, NoScores, Scores
from maxsimd.engine.processors.explain_pairs import renumbered
from maxsimd.engine.processors.prepared import Prepared
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.processors.text.tokenization import is_broken
from maxsimd.engine.requests import ScoreRequest, Value

Prepare = Callable[[ScoreRequest, RequestIds], Prepared]

# The documents of a request that cannot be prepared are tried this many at a time, then one by one.
_TOGETHER = 32


@dataclass(frozen=True, slots=True, eq=False)
class ScoresOfSome:
    """The documents at `positions` have scores, and the others of `num_documents` none."""

    scores: Combine
    positions: NDArray[np.int64]
    num_documents: int

    def __call__(self, values: list[Value]) -> Scores:
        found = np.full(self.num_documents, np.nan, dtype=np.float32)
        found[self.positions] = self.scores(values)
        return found


def prepare_readable(prepare: Prepare, request: ScoreRequest, ids: RequestIds) -> Prepared:
    """A request with all its documents, or else with those that can be read; the others have errors. Raises
    InvalidRequestError for what is wrong with anything but its documents."""
    try:
        return prepare(request, ids)
    except InvalidRequestError as error:
        if error.param != "documents":
            raise
    errors = dict(_unreadable(prepare, request, ids))
    positions = [i for i in range(len(request.documents)) if i not in errors]
    if not positions:
        return Prepared([], 0, 0, NoScores(len(request.documents)), errors=errors)
    prepared = prepare(only(request, positions), ids)
    combine = ScoresOfSome(prepared.combine, np.array(positions), len(request.documents))
    rows = None
    if prepared.query_rows is not None:
        rows = np.ones(len(request.documents), dtype=np.int64)
        rows[positions] = prepared.query_rows
    cache_scores = prepared.cache_scores and _of_some(prepared.cache_scores, positions)
    explain = prepared.explain and renumbered(prepared.explain, positions)
    return replace(
        prepared,
        combine=combine,
        errors=errors,
        query_rows=rows,
        cache_scores=cache_scores,
        explain=explain,
    )


def _of_some(cache_scores: Callable[[Scores], None], positions: list[int]) -> Callable[[Scores], None]:
    return lambda scores: cache_scores(scores[positions])


def _unreadable(prepare: Prepare, request: ScoreRequest, ids: RequestIds) -> Iterator[tuple[int, str]]:
    """The documents that cannot be read, and why."""
    reasons: dict[str, str | None] = {}
    whole = []
    for i, document in enumerate(request.documents):
        if not (isinstance(document, str) and is_broken(document)):
            whole.append(i)
            continue
        # Over HTTP, all documents with half of a character are the same text: try it once.
        if document not in reasons:
            reasons[document] = _why_not(prepare, only(request, [i]), ids)
        if (reason := reasons[document]) is not None:
            yield i, reason.replace("documents[0]", f"documents[{i}]")
    for start in range(0, len(whole), _TOGETHER):
        positions = whole[start : start + _TOGETHER]
        if _why_not(prepare, only(request, positions), ids) is not None:
            for i in positions:
                reason = _why_not(prepare, only(request, [i]), ids)
                if reason is not None:
                    yield i, reason.replace("documents[0]", f"documents[{i}]")


def _why_not(prepare: Prepare, request: ScoreRequest, ids: RequestIds) -> str | None:
    try:
        prepare(request, ids)
    except InvalidRequestError as error:
        if error.param != "documents":
            raise
        return str(error)
    return None


def only(request: ScoreRequest, positions: list[int]) -> ScoreRequest:
    """The request with some of its documents."""
    documents = tuple(request.documents[i] for i in positions)
    if len(request.queries) == 1:
        return replace(request, documents=documents)
    return replace(request, documents=documents, queries=tuple(request.queries[i] for i in positions))
