"""Base classes of processors and plans, and what they share."""

import hashlib
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import accumulate
from typing import ClassVar, Generic, Self, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.cache.documents import DocumentTexts, TenantTexts
from maxsimd.engine.cache.store import CachedScore, PairKeys, RunFacts, ScoreCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError, UnknownDocumentsError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.processors.text.builder import LengthLimits, check_tokens
from maxsimd.engine.processors.text.tokenization import TextTokenizer, is_broken
from maxsimd.engine.requests import (
    DocumentDigest,
    EmbedRequest,
    LabelRequest,
    Scored,
    ScoreOptions,
    ScoreRequest,
    ScoreResult,
    Usage,
    Value,
    Values,
    as_scored,
    as_truncation,
    check_paired,
    digest_of,
)
from maxsimd.engine.scoring.scale import Calibration, has_bounds
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.pooling.query_rows import QueryRows
from maxsimd.scheduler import CachedBatch, ImageJob, ResultSlot, Role, TokenSequence

# The most lines of one request's explanations, a match or a window each.
MOST_EXPLAINED = 100_000

# One score per document, float32; NaN for a document without one.
Scores: TypeAlias = NDArray[np.float32]
# The values of a plan, None for those that are missing.
PlanValues: TypeAlias = Sequence[Value | None]


@dataclass(frozen=True, slots=True)
class PriorEncoding:
    """Queries that earlier requests encoded: their tokens, and how many were truncated."""

    tokens: int = 0
    truncated: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan(ABC):
    """The sequences, cached documents and pictures that the engine runs for one request.

    `sequences` has queries first, `cached` has batches of documents whose embeddings are cached or were
    sent, and `images` the pictures of the sequences in their order. Together they give `num_values`
    values. `truncated` counts truncated inputs. `cached_documents` need no work; they had `cached_tokens`."""

    sequences: list[TokenSequence]
    num_values: int
    truncated: int = 0
    cached: list[CachedBatch] = field(default_factory=list)
    images: list[ImageJob] = field(default_factory=list)
    cached_documents: int = 0
    cached_tokens: int = 0
    prior: PriorEncoding = PriorEncoding()

    @abstractmethod
    def input_of(self, value: int) -> str:
        """Names the input of a value for an error message."""

    def refusal_of(self, value: int) -> InvalidRequestError | None:
        """Returns the error for an input that makes this value infinite or NaN, if one does."""
        return None

    @property
    def usage(self) -> Usage:
        tokens = of_queries = new_tokens = 0
        for sequence in self.sequences:
            length = len(sequence)
            new_tokens += sequence.num_new_tokens
            if not sequence.is_prefix:
                tokens += length
            if sequence.payload.role is Role.QUERY:
                of_queries += length
        # Documents that were sent as embeddings have no tokens. Others count with the first part of a query.
        batches = [each for each in self.cached if each.query_part is None or each.query_part[0] == 0]
        embeddings = [embedding for batch in batches for embedding in batch.documents.embeddings]
        cached = [embedding.tokens for embedding in embeddings if embedding.tokens]
        tokens += sum(cached) + self.cached_tokens
        before = self.prior.tokens
        return Usage(
            tokens + before, tokens - new_tokens, len(cached) + self.cached_documents, of_queries + before
        )


@dataclass(frozen=True, slots=True)
class Normalization:
    """The conversion of a model's scores into numbers from 0 to 1 for requests with `normalize`.

    Probabilities of classifiers stay. Negative cosines become 0. A MaxSim sum is first divided by the
    number of query tokens. A `calibration` then makes probabilities."""

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
        is_sum = not model.score_type.scores_together and model.similarity == "maxsim"
        return cls(model.score_task == "classify", is_sum, calibration)

    def apply(self, scores: Scores, query_rows: NDArray[np.int64] | None = None) -> Scores:
        if not self.is_probability:
            divisor = np.maximum(1, query_rows) if self.is_sum and query_rows is not None else 1
            scores = np.clip(scores / divisor, 0, 1)
        return scores if self.calibration is None else self.calibration(scores)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScorePlan(Plan):
    """The plan of a score request, which makes scores of values and explains them. `truncated_queries` are
    among the `truncated`. `errors` are the reasons of unreadable documents."""

    request: ScoreRequest
    errors: Mapping[int, str] = field(default_factory=dict)
    truncated_queries: int = 0
    normalization: Normalization | None = None

    @abstractmethod
    def raw_scores(self, values: PlanValues) -> Scores:
        """Returns each document's score as the model computes it, NaN where a value is missing."""

    def final_scores(self, raw: Scores) -> Scores:
        """Returns scores as callers get them: with activation and normalization, where they apply."""
        return raw if self.normalization is None else self.normalization.apply(raw)

    @abstractmethod
    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        """Returns the documents whose scores depend on any of these values."""

    @abstractmethod
    def explanations(self, values: PlanValues, documents: Iterable[int]) -> dict[int, Explanation]:
        """Explains those of the `documents` that have a score, for requests with `explain`."""

    def explanation_size(self, documents: Iterable[int]) -> int:
        """Returns the work of explaining documents, as characters that could be read meanwhile."""
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

    def scores(self, values: PlanValues) -> list[float]:
        """Returns the score of each document, NaN where values are missing."""
        scores: list[float] = self.final_scores(self.raw_scores(values)).tolist()
        return scores

    def result(self, values: Values) -> ScoreResult:
        """Makes one score per document, and caches new ones."""
        raw = self.raw_scores(values.values)
        self.cache_scores(raw)
        final = self.final_scores(raw)
        errors: dict[int, str] = {}
        for reason in dict.fromkeys(values.errors.values()):
            failed = [value for value, other in values.errors.items() if other == reason]
            errors |= dict.fromkeys(self.documents_of(failed), reason)
        errors |= self.errors
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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UnscoredPlan(ScorePlan):
    """A request that runs nothing: its time was up, or none of its documents can be read."""

    @classmethod
    def of(cls, request: ScoreRequest, errors: Mapping[int, str] | None = None) -> Self:
        return cls(sequences=[], num_values=0, request=request, errors=errors or {})

    def raw_scores(self, values: PlanValues) -> Scores:
        return np.full(self.request.num_documents, np.nan, dtype=np.float32)

    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        return ()

    def explanations(self, values: PlanValues, documents: Iterable[int]) -> dict[int, Explanation]:
        return {}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadablePlan(ScorePlan):
    """A request with unreadable documents. `inner` plans those at `positions`."""

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

    def raw_scores(self, values: PlanValues) -> Scores:
        return self._among_all(self.inner.raw_scores(values))

    def final_scores(self, raw: Scores) -> Scores:
        return self._among_all(self.inner.final_scores(raw[self.positions]))

    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        return [self.positions[i] for i in self.inner.documents_of(values)]

    def refusal_of(self, value: int) -> InvalidRequestError | None:
        return self.inner.refusal_of(value)

    def explanations(self, values: PlanValues, documents: Iterable[int]) -> dict[int, Explanation]:
        found = self.inner.explanations(values, self._readable(documents))
        return {self.positions[i]: explanation for i, explanation in found.items()}

    def explanation_size(self, documents: Iterable[int]) -> int:
        return self.inner.explanation_size(self._readable(documents))

    def _readable(self, documents: Iterable[int]) -> list[int]:
        number = {position: i for i, position in enumerate(self.positions)}
        return [number[document] for document in documents if document in number]

    def cache_scores(self, raw: Scores) -> None:
        self.inner.cache_scores(raw[self.positions])

    def _among_all(self, scores: Scores) -> Scores:
        """Adds NaN for unreadable documents."""
        found = np.full(self.request.num_documents, np.nan, dtype=scores.dtype)
        found[self.positions] = scores
        return found


@dataclass(frozen=True, slots=True, eq=False)
class FoundScores:
    """The documents of a request with cached scores, and those to run: `new`, in order. New scores go into
    the `cache` under `keys`; None for one that is not cached."""

    num_documents: int
    new: list[int]
    cached: dict[int, CachedScore] = field(default_factory=dict)
    keys: list[bytes | None] = field(default_factory=list)
    cache: ScoreCache | None = None

    @classmethod
    def none(cls, request: ScoreRequest) -> Self:
        return cls(request.num_documents, list(range(request.num_documents)))

    @property
    def cached_tokens(self) -> int:
        return sum(entry.facts.tokens for entry in self.cached.values())

    @property
    def truncated_documents(self) -> int:
        """Counts documents truncated for cached scores; in lists, the queries too."""
        return sum(entry.facts.truncated for entry in self.cached.values())

    def truncated_queries(self, request: ScoreRequest) -> int:
        """Counts queries truncated for cached scores, without those that are run again for new documents."""
        run_again = {request.query_of(i) for i in self.new}
        queries = {request.query_of(i) for i, entry in self.cached.items() if entry.facts.query_truncated}
        return len(queries - run_again)

    def with_new(self, scores: Scores) -> Scores:
        """Returns the scores of all documents, from those of the new ones."""
        if not self.cached:
            return scores
        found = np.empty(self.num_documents, dtype=np.float32)
        found[[*self.cached]] = [entry.score for entry in self.cached.values()]
        found[self.new] = scores
        return found

    def put(self, scores: Scores, facts: Iterable[RunFacts]) -> None:
        """Caches the new ones among the raw `scores` of all documents. `facts` are those of the new ones."""
        if self.cache is None or not self.new:
            return
        of_new = zip(self.keys, scores[self.new].tolist(), facts, strict=True)
        self.cache.put(
            (key, CachedScore(score, one))
            for key, score, one in of_new
            if key is not None and math.isfinite(score)
        )

    def explanation(self, document: int) -> Explanation | None:
        """Explains a document whose score is cached; None for another."""
        entry = self.cached.get(document)
        if entry is None:
            return None
        return Explanation(entry.facts.tokens, bool(entry.facts.truncated), cached=True)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CachedScorePlan(ScorePlan):
    """A plan with cached scores. `facts` are those of the `found.new` documents."""

    found: FoundScores
    facts: list[RunFacts]

    def cache_scores(self, raw: Scores) -> None:
        self.found.put(raw, self.facts)


def find_scores(cache: ScoreCache | None, request: ScoreRequest, together: bool) -> FoundScores:
    """Finds the cached scores of a request; none without a `cache`. With `together` scores depend on others,
    so those of all documents are found, or none."""
    if cache is None or request.cache == "bypass":
        return FoundScores.none(request)
    keys = _score_keys(request, together)
    found: list[CachedScore | None] = [None] * len(keys)
    if request.cache == "use":
        entries = iter(cache.find([key for key in keys if key is not None]))
        found = [None if key is None else next(entries) for key in keys]
    if request.explain:
        # The cache has only the best score of several windows, and no tokens of a joint run.
        found = [None if entry is None or entry.facts.windows > 1 or together else entry for entry in found]
    if together and None in found:
        found = [None] * len(keys)
    new = [i for i, entry in enumerate(found) if entry is None]
    cached = {i: entry for i, entry in enumerate(found) if entry is not None}
    return FoundScores(len(keys), new, cached, [keys[i] for i in new], cache)


def _score_keys(request: ScoreRequest, together: bool) -> list[bytes | None]:
    """Returns the key of each document's score; None for pairs with pictures, which are not cached."""
    how = f"{request.truncation!r} {request.instruction!r} {request.cache_owner!r}"
    is_one_list = together and len(request.queries) == 1
    if is_one_list:
        all_documents = hashlib.blake2b(digest_size=32)
        for given in request.document_texts:
            text = given.encode("utf-8", "surrogatepass")
            all_documents.update(len(text).to_bytes(8, "big") + text)
        how = f"{how} {all_documents.hexdigest()}"
    keys: list[bytes | None] = [None] * request.num_documents
    of_query: dict[int, PairKeys] = {}
    for i, document in enumerate(request.documents):
        number = request.query_of(i)
        query = request.queries[number]
        if isinstance(query, str) and isinstance(document, str):
            yield_to_smaller()
            if number not in of_query:
                of_query = {number: PairKeys(query, how)}
            # Equal documents of a list have different scores, by their places.
            keys[i] = of_query[number].key(str(i) if is_one_list else document)
    return keys


def texts_of(digests: Sequence[DocumentDigest], kept: TenantTexts | None) -> list[str]:
    """Returns the texts of documents, equal ones as one. Raises UnknownDocumentsError if some are not
    `kept`."""
    found: dict[DocumentDigest, str | None] = {}
    for digest in digests:
        yield_to_smaller()
        if digest not in found:
            found[digest] = None if kept is None else kept.get(digest.value)
    unknown = [str(digest) for digest, text in found.items() if text is None]
    if unknown:
        raise UnknownDocumentsError.of(unknown)
    return [text for digest in digests if (text := found[digest]) is not None]


def check_explained_lines(explain: int, lines: Iterable[int]) -> None:
    """Raises RequestTooLargeError if explanations could become too long: of the `explain` documents with most
    `lines`."""
    totals = [*accumulate(nlargest(explain, lines))]
    if totals and totals[-1] > MOST_EXPLAINED:
        possible = bisect_right(totals, MOST_EXPLAINED)
        raise RequestTooLargeError(
            f"explain would give up to {totals[-1]} matches, windows and tokens for {explain} results, and "
            f"at most {MOST_EXPLAINED} are given; ask for at most {possible} results (top_n of a ranking), "
            "send fewer documents, or leave explain out"
        )


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The ids of one request and its sequences, and the limit of its tokens."""

    request_id: int
    sequence_ids: Iterator[int]
    most_tokens: int

    def next_sequence_id(self) -> int:
        return next(self.sequence_ids)

    def slot(self, index: int) -> ResultSlot:
        return ResultSlot(self.request_id, index)

    def check_tokens(self, tokens: int) -> None:
        """Raises RequestTooLargeError if the request has too many tokens so far."""
        check_tokens(tokens, self.most_tokens)


# Documents that fail together are tried this many at a time, then one by one.
_TRIED_TOGETHER = 32

RequestT = TypeVar("RequestT", bound=ScoreRequest | EmbedRequest | LabelRequest)
PlanT = TypeVar("PlanT", bound=Plan)


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Decides which prefixes are run once for all pairs that begin with them.

    A step with a shared prefix is not replayed as a CUDA graph, but launched kernel by kernel. The device
    computes `launch_tokens` in that time; None if steps are never replayed."""

    launch_tokens: int | None = None

    def is_worth(self, prefix: int, consumers: int, own: int) -> bool:
        """Whether to share a prefix among `consumers` sequences, which have `own` more tokens in all. That
        saves the prefix for all but one. A step smaller than `launch_tokens` loses the difference."""
        if self.launch_tokens is None:
            return True
        saved = prefix * (consumers - 1)
        lost = max(0, self.launch_tokens - (prefix + own))
        return saved > lost


@dataclass(frozen=True, slots=True, eq=False)
class ProcessorContext:
    """The model, tokenizer, limits and cache that the processors of one model share. The `cache` is of
    embeddings or of scores, and `texts` are kept by their digests. Items are compared in the precision
    `scored_in`."""

    model: LoadedModel
    tokenizer: TextTokenizer
    limits: LengthLimits
    cache: EmbeddingCache | ScoreCache | None = None
    sharing: PrefixSharing | None = None
    calibration: Calibration | None = None
    scored_in: torch.dtype = torch.float32
    texts: DocumentTexts | None = None

    @property
    def embedding_cache(self) -> EmbeddingCache | None:
        return self.cache if isinstance(self.cache, EmbeddingCache) else None

    @property
    def score_cache(self) -> ScoreCache | None:
        return self.cache if isinstance(self.cache, ScoreCache) else None

    def with_instruction(self, request: ScoreRequest) -> ScoreRequest:
        """Returns the request with its own instruction, else the model's. Refuses one that is too long, or
        that the model does not take."""
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
    """Turns requests of one kind into plans. Thread-safe."""

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._model = context.model
        self._tokenizer = context.tokenizer
        self._limits = context.limits

    @abstractmethod
    def prepare(self, request: RequestT, ids: RequestIds) -> PlanT:
        """Returns what is to be run. Raises InvalidRequestError and RequestTooLargeError."""

    def _image_jobs(self, sequences: Iterable[TokenSequence]) -> list[ImageJob]:
        vision = self._model.vision
        if vision is None:
            return []
        jobs = []
        for sequence in sequences:
            images = sequence.tokens.images
            features = sum(len(image.positions) for image in images)
            jobs += [
                ImageJob(
                    image.image_id,
                    sequence.request_id,
                    vision.price(image.inputs),
                    0 if i else features,
                    image.inputs,
                    sequence.payload.slot,
                )
                for i, image in enumerate(images)
            ]
        return jobs


class ScoreProcessor(Processor[ScoreRequest, ScorePlan]):
    """The processor of score requests to one kind of model."""

    # Whether queries and documents may be sent as embeddings.
    takes_vectors: ClassVar[bool] = False
    # Whether a document's score depends on the other documents of its request.
    scores_together: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def is_for(cls, model: LoadedModel) -> bool:
        """Whether this is the processor of a model."""

    @abstractmethod
    def plan(self, request: ScoreRequest, ids: RequestIds) -> ScorePlan:
        """Returns the plan for a request whose instruction has been decided."""

    @abstractmethod
    def shortest_sequences(self) -> dict[str, int]:
        """Returns the tokens of the shortest sequence of each kind, by its name in errors."""

    def check_options(self, options: ScoreOptions) -> None:
        """Raises InvalidRequestError for options that the model cannot serve."""

    def read(
        self, queries: Scored, documents: Scored, options: ScoreOptions, top_n: int | None = None
    ) -> ScoreRequest:
        """Makes a request of what a caller passes in. At most `top_n` documents will be explained. Raises
        InvalidRequestError for what the model cannot do."""
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
        if request.has_digests and self._context.texts is None and self._needs_texts(request):
            raise InvalidRequestError(
                "documents cannot be named by digests here: their texts are needed (for this model, for "
                'explain, or for a cache mode other than "use") and are not kept; give the texts, or set '
                "document_store_mb",
                "documents",
            )
        return request

    def _needs_texts(self, request: ScoreRequest) -> bool:
        """Whether documents named by digests are read from their texts: cached embeddings do not do."""
        has_embeddings = self._context.embedding_cache is not None and request.cache == "use"
        return not has_embeddings or bool(request.explain)

    def prepare(self, request: ScoreRequest, ids: RequestIds) -> ScorePlan:
        if request.instruction is not None and any(isinstance(each, QueryRows) for each in request.queries):
            raise InvalidRequestError(
                "the query is encoded, and the instruction is part of that: give it to encode_query",
                "instruction",
            )
        request = self._with_texts(self._context.with_instruction(request))
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

    def keep_texts(self, request: ScoreRequest) -> list[DocumentDigest]:
        """Keeps the texts of a request's documents, if any are kept. Returns their digests."""
        digests = [DocumentDigest.of(text) for text in request.document_texts]
        if (kept := self._kept(request)) is not None:
            kept.put([(each.value, text) for each, text in zip(digests, request.document_texts, strict=True)])
        return digests

    def unknown_among(self, digests: Sequence[DocumentDigest], request: ScoreRequest) -> set[DocumentDigest]:
        """Returns the digests that requests like this one cannot give in place of documents."""
        kept = self._kept(request)
        return {each for each in digests if kept is None or kept.get(each.value) is None}

    def _kept(self, request: ScoreRequest) -> TenantTexts | None:
        return None if self._context.texts is None else self._context.texts.of(request.cache_owner)

    def _with_texts(self, request: ScoreRequest) -> ScoreRequest:
        """Keeps the texts of a request that names other documents by digests, and replaces the digests where
        texts are needed. Raises UnknownDocumentsError."""
        if not request.has_digests or (kept := self._kept(request)) is None:
            return request
        texts = [document for document in request.documents if isinstance(document, str)]
        kept.put([(digest_of(text), text) for text in texts])
        if not self._needs_texts(request):
            return request
        digests = [document for document in request.documents if isinstance(document, DocumentDigest)]
        found = iter(texts_of(digests, kept))
        documents = [
            next(found) if isinstance(document, DocumentDigest) else document
            for document in request.documents
        ]
        return replace(request, documents=tuple(documents))

    def _normalization(self, request: ScoreRequest) -> Normalization | None:
        return Normalization.of(self._model, self._context.calibration) if request.normalize else None

    def _unreadable(self, request: ScoreRequest, ids: RequestIds) -> Iterator[tuple[int, str]]:
        tried: dict[str, tuple[int, str | None]] = {}
        whole = []
        for i, document in enumerate(request.documents):
            if not (isinstance(document, str) and is_broken(document)):
                whole.append(i)
                continue
            # Over HTTP, all documents with half of a character are the same text: try it once.
            if document not in tried:
                tried[document] = i, self._refusal(request, [i], ids)
            first, reason = tried[document]
            if reason is not None:
                yield i, reason.replace(f"documents[{first}]", f"documents[{i}]")
        for start in range(0, len(whole), _TRIED_TOGETHER):
            positions = whole[start : start + _TRIED_TOGETHER]
            if self._refusal(request, positions, ids) is not None:
                for i in positions:
                    if (reason := self._refusal(request, [i], ids)) is not None:
                        yield i, reason

    def _refusal(self, request: ScoreRequest, positions: list[int], ids: RequestIds) -> str | None:
        """Returns why one of the documents at these positions cannot be read; None if all can. Raises
        InvalidRequestError if anything but a lone document is wrong."""
        try:
            self.plan(request.only(positions), ids)
        except InvalidRequestError as error:
            params = ["documents"] if len(request.queries) == 1 else ["documents", "queries"]
            reason = str(error)
            for param in params:
                reason = reason.replace(f"{param}[0]", f"{param}[{positions[0]}]")
            if error.param == "documents" or len(positions) > 1:
                return reason
            raise InvalidRequestError(reason, error.param) from None
        return None
