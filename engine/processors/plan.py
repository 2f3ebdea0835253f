"""Plans: the sequences to run for a request, and how their values become its result."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import ScoreType
from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.requests import ScoreRequest, ScoreResult, Usage, Value, Values
from maxsimd.engine.scoring.scale import Calibration, has_bounds
from maxsimd.scheduler import CachedBatch, ImageJob, Role, TokenSequence

# Lines that one request's explanations may have together, a match or a window each.
MOST_EXPLAINED = 100_000

# One score a document, float32; NaN for a document without one.
Scores: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PriorEncoding:
    """Queries of this request that earlier requests encoded: their tokens, and how many were truncated."""

    tokens: int = 0
    truncated: int = 0


NO_PRIOR_ENCODING = PriorEncoding()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan(ABC):
    """The sequences, cached documents and pictures that the engine runs for one request.

    `sequences` are queries first, `cached` are batches of documents whose embeddings are cached or were sent,
    and `images` are the pictures of the sequences in the same order. Together they give `num_values` values.
    `truncated` counts the inputs that were truncated. `cached_documents` need nothing to be run: their
    scores or token vectors are cached, and they had `cached_tokens`."""

    sequences: list[TokenSequence]
    num_values: int
    truncated: int = 0
    cached: list[CachedBatch] = field(default_factory=list)
    images: list[ImageJob] = field(default_factory=list)
    cached_documents: int = 0
    cached_tokens: int = 0
    prior: PriorEncoding = NO_PRIOR_ENCODING

    @abstractmethod
    def input_of(self, value: int) -> str:
        """Names the input that a value belongs to, for an error message."""

    def refusal_of(self, value: int) -> InvalidRequestError | None:
        """Returns the error for an input that makes this value infinite or NaN; None if no input does."""
        return None

    @property
    def num_new_tokens(self) -> int:
        """How many tokens are run."""
        return sum(sequence.num_new_tokens for sequence in self.sequences)

    @property
    def newly_truncated(self) -> int:
        """How many inputs this request truncated, without those that an earlier request did."""
        return self.truncated - self.prior.truncated

    @property
    def usage(self) -> Usage:
        """The tokens that the request uses."""
        tokens = of_queries = new_tokens = 0
        for sequence in self.sequences:
            length = len(sequence)
            new_tokens += sequence.num_new_tokens
            if not sequence.is_prefix:
                tokens += length
            if sequence.payload.role is Role.QUERY:
                of_queries += length
        # Documents that were sent as embeddings have no tokens.
        cached = [
            embedding.tokens
            for batch in self.cached
            for embedding in batch.documents.embeddings
            if embedding.tokens
        ]
        tokens += sum(cached) + self.cached_tokens
        before = self.prior.tokens
        return Usage(
            tokens + before, tokens - new_tokens, len(cached) + self.cached_documents, of_queries + before
        )


@dataclass(frozen=True, slots=True)
class Normalization:
    """How the scores of a model become numbers from 0 to 1 for requests with `normalize`.

    The probabilities of a classifier stay as they are. Cosines lose their negative part. A MaxSim sum is
    first divided by the number of query tokens. A `calibration` then makes probabilities of these."""

    is_probability: bool
    is_sum: bool
    calibration: Calibration | None

    @classmethod
    def of(cls, model: LoadedModel, calibration: Calibration | None = None) -> Self:
        """Raises InvalidRequestError for a model whose scores have no bounds."""
        if not has_bounds(model):
            raise InvalidRequestError(
                "normalize is not possible: this model's vectors have any length, and so its scores have no "
                "bounds; leave it out",
                "normalize",
            )
        is_sum = model.score_type is not ScoreType.LISTWISE and model.similarity == "maxsim"
        return cls(model.score_task == "classify", is_sum, calibration)

    def apply(self, scores: Scores, query_rows: NDArray[np.int64] | None = None) -> Scores:
        """Normalizes scores whose queries have `query_rows` token vectors."""
        if not self.is_probability:
            divisor = query_rows if self.is_sum and query_rows is not None else 1
            scores = np.clip(scores / divisor, 0, 1)
        return scores if self.calibration is None else self.calibration(scores)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScorePlan(Plan):
    """The plan of a score request, which makes scores of its values and explains them.

    `truncated_queries` are among the `truncated`. `errors` are the reasons of documents that cannot be read.
    `normalization` is there if the request asks for it."""

    request: ScoreRequest
    errors: Mapping[int, str] = field(default_factory=dict)
    truncated_queries: int = 0
    normalization: Normalization | None = None

    @abstractmethod
    def raw_scores(self, values: Sequence[Value | None]) -> Scores:
        """Returns the score of each document as the model computes it, NaN where a value is missing."""

    @abstractmethod
    def final_scores(self, raw: Scores) -> Scores:
        """Returns scores as callers get them: with activation and normalization, where they apply."""

    @abstractmethod
    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        """Returns the documents whose scores are made of any of these values."""

    @abstractmethod
    def explanations(
        self, values: Sequence[Value | None], documents: Iterable[int]
    ) -> dict[int, Explanation]:
        """Explains those of the `documents` that have a score. Only for requests with `explain`."""

    def explanation_size(self, documents: Iterable[int]) -> int:
        """Returns how much work it is to explain documents, as the number of characters that could be read
        meanwhile."""
        texts = self.request.documents
        return sum(len(text) for i in documents if isinstance(text := texts[i], str))

    def cache_scores(self, raw: Scores) -> None:
        """Caches the new scores, if this kind of model has a cache of scores."""

    @property
    def keeps_order(self) -> bool:
        """Whether a larger raw score never becomes a smaller final score."""
        return True

    def input_of(self, value: int) -> str:
        return f"documents[{self.documents_of([value])[0]}]"

    def scores(self, values: Sequence[Value | None]) -> list[float]:
        """Returns the score of each document, NaN where values are still missing."""
        scores: list[float] = self.final_scores(self.raw_scores(values)).tolist()
        return scores

    def result(self, values: Values) -> ScoreResult:
        """Makes one score a document, and caches new ones."""
        raw = self.raw_scores(values.values)
        self.cache_scores(raw)
        final = self.final_scores(raw)
        errors = {**self._value_errors(values.errors), **self.errors}
        is_changed = final is not raw and not np.array_equal(raw, final, equal_nan=True)
        return ScoreResult(
            final.tolist(),
            self.usage,
            self.truncated,
            tuple(i for i in np.flatnonzero(np.isnan(final)).tolist() if i not in errors),
            errors,
            values.timings,
            truncated_queries=self.truncated_queries,
            raw_scores=raw.tolist() if is_changed and self.keeps_order else None,
        )

    def _value_errors(self, errors: Mapping[int, str]) -> dict[int, str]:
        """Errors of values as errors of documents."""
        of_documents: dict[int, str] = {}
        for reason in dict.fromkeys(errors.values()):
            values = [value for value, other in errors.items() if other == reason]
            of_documents |= dict.fromkeys(self.documents_of(values), reason)
        return of_documents


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UnscoredPlan(ScorePlan):
    """A request of which nothing is run: its time was up, or none of its documents can be read."""

    @classmethod
    def of(cls, request: ScoreRequest, errors: Mapping[int, str] | None = None) -> Self:
        return cls(sequences=[], num_values=0, request=request, errors=errors or {})

    def raw_scores(self, values: Sequence[Value | None]) -> Scores:
        return np.full(self.request.num_documents, np.nan, dtype=np.float32)

    def final_scores(self, raw: Scores) -> Scores:
        return raw

    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        return ()

    def explanations(
        self, values: Sequence[Value | None], documents: Iterable[int]
    ) -> dict[int, Explanation]:
        return {}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadablePlan(ScorePlan):
    """A request of which some documents cannot be read. `inner` is the plan for the others, which are at
    `positions` of the request."""

    inner: ScorePlan
    positions: list[int]

    @classmethod
    def of(cls, request: ScoreRequest, inner: ScorePlan, errors: Mapping[int, str]) -> Self:
        return cls(
            **{name: getattr(inner, name) for name in Plan.__dataclass_fields__},
            request=request,
            errors=errors,
            truncated_queries=inner.truncated_queries,
            inner=inner,
            positions=[i for i in range(request.num_documents) if i not in errors],
        )

    @property
    def keeps_order(self) -> bool:
        return self.inner.keeps_order

    def raw_scores(self, values: Sequence[Value | None]) -> Scores:
        return self._among_all(self.inner.raw_scores(values))

    def final_scores(self, raw: Scores) -> Scores:
        return self._among_all(self.inner.final_scores(raw[self.positions]))

    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        return [self.positions[i] for i in self.inner.documents_of(values)]

    def refusal_of(self, value: int) -> InvalidRequestError | None:
        return self.inner.refusal_of(value)

    def explanations(
        self, values: Sequence[Value | None], documents: Iterable[int]
    ) -> dict[int, Explanation]:
        found = self.inner.explanations(values, self._readable(documents))
        return {self.positions[i]: explanation for i, explanation in found.items()}

    def explanation_size(self, documents: Iterable[int]) -> int:
        return self.inner.explanation_size(self._readable(documents))

    def _readable(self, documents: Iterable[int]) -> list[int]:
        """Returns where those of the documents that can be read are among these."""
        number = {position: i for i, position in enumerate(self.positions)}
        return [number[document] for document in documents if document in number]

    def cache_scores(self, raw: Scores) -> None:
        self.inner.cache_scores(raw[self.positions])

    def _among_all(self, scores: Scores) -> Scores:
        """Scores of the readable documents, with NaN for the others."""
        found = np.full(self.request.num_documents, np.nan, dtype=scores.dtype)
        found[self.positions] = scores
        return found


def with_window_scores(explanation: Explanation, scores: Scores) -> Explanation:
    """Replaces the scores of an explanation's windows."""
    windows = zip(explanation.windows, scores.tolist(), strict=True)
    return replace(explanation, windows=tuple(replace(window, score=score) for window, score in windows))


def check_explained_lines(explain: int, lines: Iterable[int]) -> None:
    """Raises RequestTooLargeError if explanations could become too long.

    At most `explain` documents are explained, and `lines` has how many lines each document would take."""
    most = sum(nlargest(explain, lines))
    if most > MOST_EXPLAINED:
        raise RequestTooLargeError(
            f"explain would give up to {most} matches and windows for {explain} results, and at most "
            f"{MOST_EXPLAINED} are given; ask for fewer results (top_n of a ranking), send fewer documents, "
            "or leave explain out"
        )
