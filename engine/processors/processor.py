"""The base of all processors, and how score requests are read, whatever the kind of model."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.cache.store import ScoreCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.plan import Normalization, Plan, ReadablePlan, ScorePlan, UnscoredPlan
from maxsimd.engine.processors.prefix_sharing import PrefixSharing
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.processors.text.tokenization import TextTokenizer, is_broken
from maxsimd.engine.processors.text.truncation import LengthLimits
from maxsimd.engine.requests import (
    EmbedRequest,
    Scored,
    ScoreOptions,
    ScoreRequest,
    as_scored,
    as_truncation,
    check_paired,
)
from maxsimd.engine.scoring.scale import Calibration
from maxsimd.pooling.query_rows import QueryRows

# Documents that cannot be prepared together are tried this many at a time, then one by one.
_TRIED_TOGETHER = 32

RequestT = TypeVar("RequestT", bound=ScoreRequest | EmbedRequest)
PlanT = TypeVar("PlanT", bound=Plan)


@dataclass(frozen=True, slots=True, eq=False)
class ProcessorContext:
    """The model, tokenizer, limits and cache that the processors of one model share.

    The `cache` has embeddings if documents are encoded without their query, else scores. With `sharing`,
    tokens that all pairs of a query begin with are run once. `calibration` makes probabilities of scores."""

    model: LoadedModel
    tokenizer: TextTokenizer
    limits: LengthLimits
    cache: EmbeddingCache | ScoreCache | None = None
    sharing: PrefixSharing | None = None
    calibration: Calibration | None = None

    @property
    def embedding_cache(self) -> EmbeddingCache | None:
        return self.cache if isinstance(self.cache, EmbeddingCache) else None

    @property
    def score_cache(self) -> ScoreCache | None:
        return self.cache if isinstance(self.cache, ScoreCache) else None

    def with_instruction(self, request: ScoreRequest) -> ScoreRequest:
        """Returns the request with the instruction to use: its own, else the model's.

        Raises InvalidRequestError if the model takes none, or if it is too long."""
        if request.instruction is not None and not self.model.takes_instruction:
            raise InvalidRequestError("this model takes no instruction; leave it out", "instruction")
        if not request.instruction:
            default = self.model.instruction
            return request if default is request.instruction else replace(request, instruction=default)
        # An instruction is part of other texts, maybe many. Check it first, so that errors name it.
        longest = self.limits.longest_sequence
        (tokens,) = self.tokenizer.encode([request.instruction], "instruction", longest)
        if len(tokens) == longest:
            raise InvalidRequestError(
                f"instruction has {longest} tokens or more, and no more can be run in a sequence; shorten it",
                "instruction",
            )
        return request


class Processor(ABC, Generic[RequestT, PlanT]):
    """Turns requests of one kind into plans. Thread-safe: it holds what is the same for all requests."""

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._model = context.model
        self._tokenizer = context.tokenizer
        self._limits = context.limits

    @abstractmethod
    def prepare(self, request: RequestT, ids: RequestIds) -> PlanT:
        """Returns what is to be run. Raises InvalidRequestError and RequestTooLargeError."""

    @abstractmethod
    def shortest_sequences(self) -> dict[str, int]:
        """Returns how many tokens the shortest sequence of each kind has, by its name in errors."""


class ScoreProcessor(Processor[ScoreRequest, ScorePlan]):
    """The processor of score requests to one kind of model."""

    # Whether queries and documents may come as their embeddings.
    takes_vectors: ClassVar[bool] = False
    # Whether a document's score depends on the other documents of its request.
    scores_together: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def is_for(cls, model: LoadedModel) -> bool:
        """Whether this is the processor of a model."""

    @abstractmethod
    def plan(self, request: ScoreRequest, ids: RequestIds) -> ScorePlan:
        """Returns what is to be run for a request, whose instruction is the one to use."""

    def check_options(self, options: ScoreOptions) -> None:
        """Raises InvalidRequestError for options that the model cannot serve."""

    def read(
        self, queries: Scored, documents: Scored, options: ScoreOptions, top_n: int | None = None
    ) -> ScoreRequest:
        """Makes a request of what a caller passes in. At most `top_n` documents will be explained.

        Raises InvalidRequestError for what the model cannot do."""
        self.check_options(options)
        if options["normalize"]:
            Normalization.of(self._model)
        takes_pictures = self._model.vision is not None
        given = as_scored(documents, "documents", self.takes_vectors, takes_pictures)
        explain = options["explain"]
        request = ScoreRequest(
            queries=as_scored(queries, "queries", self.takes_vectors, takes_pictures),
            documents=given,
            truncation=as_truncation(options["truncation"]),
            instruction=options["instruction"],
            use_activation=options["use_activation"],
            normalize=options["normalize"],
            cache=options["cache"],
            explain=min(top_n or len(given), len(given)) if explain else 0,
            maps=explain == "maps",
            skip_unreadable=options["on_error"] == "report",
        )
        if isinstance(explain, str) and explain != "maps":
            raise InvalidRequestError(f"explain {explain!r} is not known; use true, false or maps", "explain")
        check_paired(request.queries, request.documents)
        return request

    def prepare(self, request: ScoreRequest, ids: RequestIds) -> ScorePlan:
        if request.instruction is not None and any(isinstance(each, QueryRows) for each in request.queries):
            raise InvalidRequestError(
                "the query is encoded, and the instruction is part of that: give it to encode_query",
                "instruction",
            )
        request = self._context.with_instruction(request)
        if not request.skip_unreadable:
            return self.plan(request, ids)
        try:
            return self.plan(request, ids)
        except InvalidRequestError as error:
            if error.param != "documents":
                raise
        errors = dict(self._unreadable(request, ids))
        readable = [i for i in range(request.num_documents) if i not in errors]
        if not readable:
            return UnscoredPlan.of(request, errors)
        return ReadablePlan.of(request, self.plan(request.only(readable), ids), errors)

    def _normalization(self, request: ScoreRequest) -> Normalization | None:
        return Normalization.of(self._model, self._context.calibration) if request.normalize else None

    def _unreadable(self, request: ScoreRequest, ids: RequestIds) -> Iterator[tuple[int, str]]:
        """Yields the documents that cannot be read, with the reason."""
        reasons: dict[str, str | None] = {}
        whole = []
        for i, document in enumerate(request.documents):
            if not (isinstance(document, str) and is_broken(document)):
                whole.append(i)
                continue
            # Over HTTP, all documents with half of a character are the same text: try it once.
            if document not in reasons:
                reasons[document] = self._refusal(request.only([i]), ids)
            if (reason := reasons[document]) is not None:
                yield i, reason.replace("documents[0]", f"documents[{i}]")
        for start in range(0, len(whole), _TRIED_TOGETHER):
            positions = whole[start : start + _TRIED_TOGETHER]
            if self._refusal(request.only(positions), ids) is not None:
                for i in positions:
                    reason = self._refusal(request.only([i]), ids)
                    if reason is not None:
                        yield i, reason.replace("documents[0]", f"documents[{i}]")

    def _refusal(self, request: ScoreRequest, ids: RequestIds) -> str | None:
        """Returns why the documents of a request cannot be read; None if they can."""
        try:
            self.plan(request, ids)
        except InvalidRequestError as error:
            if error.param != "documents":
                raise
            return str(error)
        return None
