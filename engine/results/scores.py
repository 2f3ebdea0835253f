"""One call of `Engine.score`, `rerank` or `stream`: what it asks for, and what is made of its values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import ScoreType
from maxsimd.engine.device.load import DeviceModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.processors import Prepared, usage_of
from maxsimd.engine.requests import RunOptions, ScoreOptions, ScoreRequest, ScoreResult, Value, Values
from maxsimd.engine.results.postprocess import (
    Bounded,
    activate,
    bounded_by,
    document_scores,
    keeps_order,
    unscored,
)
from maxsimd.engine.validation import Scored, as_scored, as_truncation, check_paired, check_scores
from maxsimd.pooling.methods import Head


@dataclass(frozen=True, slots=True)
class ScoreLabel:
    """The label whose probability is the score. Labels that are `exclusive` share 1 between them."""

    index: int
    exclusive: bool

    def logits_of(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """The numbers [n] whose sigmoids are the probabilities, of the logits [n, labels] of all labels."""
        numbers = rows.astype(np.float64)
        if not self.exclusive:
            return numbers[:, self.index]
        others = np.delete(numbers, self.index, axis=1)
        greatest = others.max(axis=1, keepdims=True)
        rest = np.log(np.exp(others - greatest).sum(axis=1))
        logits: NDArray[np.float64] = numbers[:, self.index] - greatest[:, 0] - rest
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class ScoreCall:
    """`activation` is that of a classifier, if it is wanted, and `bounded` maps scores to 0..1, if that
    is. Of several labels' logits those of a `label` count."""

    request: ScoreRequest
    run_options: RunOptions
    activation: Head | None = None
    bounded: Bounded | None = None
    label: ScoreLabel | None = None

    @property
    def num_documents(self) -> int:
        return len(self.request.documents)

    @property
    def keeps_order(self) -> bool:
        """Whether the best document before the activation is the best behind it."""
        return self.activation is None or keeps_order(self.activation)

    def scored(self, values: Values) -> Values:
        """The values with a number in place of the logits of several labels."""
        there = [value for value in values.values if value is not None]
        if self.label is None or not there:
            return values
        logits = iter(self.label.logits_of(np.array(there).reshape(len(there), -1)).tolist())
        numbers: list[Value | None] = [None if value is None else next(logits) for value in values.values]
        return replace(values, values=numbers)

    def finished(
        self, scores: NDArray[np.float32], query_rows: NDArray[np.int64] | None
    ) -> NDArray[np.float32]:
        """Scores as the model makes them, behind the activation and within bounds."""
        if self.activation is not None:
            scores = activate(scores[:, None], self.activation)[:, 0]
        return scores if self.bounded is None else self.bounded(scores, query_rows)


def _maps(explain: bool | str) -> bool:
    if isinstance(explain, str) and explain != "maps":
        raise InvalidRequestError(f"explain {explain!r} is not known; use true, false or maps", "explain")
    return explain == "maps"


def score_call(
    loaded: DeviceModel, queries: Scored, documents: Scored, options: ScoreOptions, top_n: int | None = None
) -> ScoreCall:
    """A call with all of its options, of which at most `top_n` documents are to be explained, if any are.
    Raises InvalidRequestError for what the model cannot do."""
    model = loaded.model
    _check_possible(model, options)
    normalize = options["normalize"]
    bounded = bounded_by(model, loaded.calibration) if normalize else None
    takes_vectors = model.encodes_apart
    takes_pictures = model.vision is not None
    given = as_scored(documents, "documents", takes_vectors, takes_pictures)
    request = ScoreRequest(
        queries=as_scored(queries, "queries", takes_vectors, takes_pictures),
        documents=given,
        truncation=as_truncation(options["truncation"]),
        instruction=options["instruction"],
        cache=options["cache"],
        explain=min(top_n or len(given), len(given)) if options["explain"] else 0,
        maps=_maps(options["explain"]),
    )
    check_paired(request.queries, request.documents)
    run_options = RunOptions(
        options["priority"],
        options["tenant"],
        options["timeout"],
        options["progress"],
        options["on_timeout"],
        options["on_error"],
    )
    activation: Head | None = None
    label = None
    if model.score_label is not None:
        label = ScoreLabel(model.score_label, exclusive=model.probabilities is not torch.sigmoid)
        activation = torch.sigmoid if options["use_activation"] or normalize else None
    elif model.score_task == "classify" and (options["use_activation"] or normalize):
        activation = model.probabilities if normalize else model.activation
    return ScoreCall(request, run_options, activation, bounded, label)


def _check_possible(model: LoadedModel, options: ScoreOptions) -> None:
    is_listwise = model.score_type is ScoreType.LISTWISE
    check_scores(model.labels, model.has_score, is_listwise, options["on_timeout"], options["on_error"])


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPairs:
    """A call with its values, or those that have come so far."""

    call: ScoreCall
    prepared: Prepared
    values: Values

    @property
    def work(self) -> int:
        """How much work it is to make scores of the values."""
        return max(self.call.num_documents, len(self.values.values))

    def scores(self) -> list[float]:
        """The score of each document, NaN for those of which values are missing."""
        scores, _ = document_scores(self.prepared.combine, self.call.scored(self.values))
        finished: list[float] = self.call.finished(scores, self.prepared.query_rows).tolist()
        return finished

    def result(self) -> ScoreResult:
        """One score a document; caches those that are to be cached."""
        scores, errors = document_scores(self.prepared.combine, self.call.scored(self.values))
        errors |= self.prepared.errors
        if self.prepared.cache_scores is not None:
            self.prepared.cache_scores(scores)
        raw, scores = scores, self.call.finished(scores, self.prepared.query_rows)
        loses_differences = self.call.keeps_order and not np.array_equal(raw, scores, equal_nan=True)
        return ScoreResult(
            scores.tolist(),
            usage_of(self.prepared),
            self.prepared.truncated,
            unscored(scores, errors),
            errors,
            self.values.timings,
            truncated_queries=self.prepared.truncated_queries,
            raw_scores=raw.tolist() if loses_differences else None,
        )

    def explanations(self, documents: Sequence[int]) -> dict[int, Explanation]:
        """How those of the `documents` that have a score came to it, of a request that asks for that. The
        scores of windows are made as those of documents are."""
        explain = self.prepared.explain
        if explain is None:
            return {}
        explained: dict[int, Explanation] = {}
        values = self.call.scored(self.values)
        for index in documents:
            explanation = explain(values, index)
            if explanation is not None:
                explained[index] = self._with_finished_windows(explanation, index)
        return explained

    def _with_finished_windows(self, explanation: Explanation, index: int) -> Explanation:
        if not explanation.windows:
            return explanation
        raw = np.array([window.score for window in explanation.windows], dtype=np.float32)
        rows = self.prepared.query_rows
        scores = self.call.finished(raw, None if rows is None else np.full(len(raw), rows[index]))
        windows = zip(explanation.windows, scores.tolist(), strict=True)
        return replace(explanation, windows=tuple(replace(window, score=score) for window, score in windows))
