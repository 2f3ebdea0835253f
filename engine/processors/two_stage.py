"""Score requests whose queries and documents are run apart: late interaction and bi-encoders."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.cache_lookup import CacheLookup
from maxsimd.engine.processors.combine import FirstNumbers, best_windows, shared_scores, summed_parts
from maxsimd.engine.processors.documents import (
    Document,
    DocumentInCache,
    DocumentReader,
    Documents,
    DocumentToRun,
)
from maxsimd.engine.processors.explain_encoded import (
    EncodedExplainer,
    Side,
    check_can_be_explained,
    check_explained,
)
from maxsimd.engine.processors.given_vectors import GivenVectors, OverflowCheck
from maxsimd.engine.processors.pages import image_jobs, page_builder
from maxsimd.engine.processors.prepared import Prepared
from maxsimd.engine.processors.queries import Query, QueryReader, all_before
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.processors.text.long_inputs import LengthLimits, LongInputs
from maxsimd.engine.processors.text.texts import BuiltText, TextBuilder, shortest_text
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import ScoreRequest
from maxsimd.engine.scoring.documents import CachedDocument, CachedDocuments
from maxsimd.engine.scoring.price import EXPLAINED, ScoringPrice
from maxsimd.pooling.vectors import Vectors
from maxsimd.scheduler import CachedBatch, DocumentPayload, Explained, Window
from maxsimd.scheduler import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How many rows, as `ScoringPrice` counts them, and documents a batch of cached documents has at most, so
    that scoring it takes little new memory and little time."""

    rows: int
    documents: int


# The first row of a part of a query, the one after its last or None, and how many it has; None for all rows.
Part: TypeAlias = tuple[int, int | None, int] | None

ON_HOST = BatchLimits(16_384, 512)
# Where the embeddings are on the device, a batch costs little more than its launch: of fewer there would be
# less to do on the device than before it. They take 128 MiB in float32 of 128 dimensions where they are not.
IN_SLAB = BatchLimits(262_144, 4096)


class TwoStageStrategy:
    """Queries first, then the documents to be run, and apart from them those whose embeddings are cached.

    With token embeddings a document's windows are scored as one, which is exact: MaxSim is a maximum over the
    union of their tokens. Else each window has a score, and the best counts."""

    def __init__(
        self, model: LoadedModel, tokenizer: TextTokenizer, limits: LengthLimits, cache: EmbeddingCache | None
    ) -> None:
        self._query_rules = model.query
        self._document_rules = model.document
        self._task = model.score_task
        self._windows_as_one = model.score_task == "token_embed"
        self._tokenizer = tokenizer
        self._limits = limits
        self._cache = cache
        self._batches = ON_HOST if cache is None or cache.slab is None else IN_SLAB
        self._given = GivenVectors(model, limits.most_vectors)
        self._price = ScoringPrice.of(model)
        self._vision = model.vision
        self._pages = page_builder(model, tokenizer, limits.longest_sequence)
        self._queries = QueryReader(model, tokenizer, limits, self._given, self._pages)
        self._similarity = model.similarity
        self._token_pooling = model.token_pooling

    def prepare(self, request: ScoreRequest, ids: RequestIds) -> Prepared:
        if request.explain:
            check_can_be_explained(self._token_pooling)
        long_inputs = self._limits.applied_to(request.truncation, ids)
        builder = self._queries.builder(request, long_inputs)
        reader = self._reader(request, long_inputs)
        documents = reader.read(request, ids)
        queries = self._queries.read(request, builder, ids)
        if self._windows_as_one:
            self._check_pairs(documents, [query.num_rows for query in queries])
        num_parts = [self._num_parts(request, document, queries) for document in documents.different]
        num_consumers = [0] * len(queries)
        for document, parts in zip(documents.different, num_parts, strict=True):
            num_consumers[document.query] += document.num_consumers * parts
        sequences = [
            TokenSequence.query(query.id, ids.request_id, self._task, query.built.tokens, consumers)
            for query, consumers in zip(queries, num_consumers, strict=True)
            if isinstance(query.built, BuiltText)
        ]
        cached: dict[tuple[Query, torch.dtype, Part], list[CachedDocument]] = {}
        num_values = num_parts
        if not self._windows_as_one:
            num_values = [document.num_consumers for document in documents.different]
        firsts = accumulate(num_values, initial=0)
        for document, parts, first in zip(documents.different, num_parts, firsts, strict=False):
            query = queries[document.query]
            if isinstance(document, DocumentInCache):
                explained = self._how_explained(request, document)
                for i, part in enumerate(_parts_of(query, parts)):
                    found = CachedDocument(ids.slot(first + i), document.embedding, explained)
                    # Those that came along may be in other numbers than those that are cached.
                    cached.setdefault((query, document.embedding.rows.dtype, part), []).append(found)
            elif self._windows_as_one:
                explained = self._how_explained(request, document)
                sequences += self._scored_as_one(document, query, first, ids, explained)
            else:
                sequences += self._scored_apart(document, query, first, ids)
        batches = [
            batch
            for (query, _, part), found in cached.items()
            for batch in in_batches(
                found,
                query.id,
                query.num_rows if part is None else part[2],
                self._price,
                given_query=query.given,
                query_part=None if part is None else part[:2],
                limits=self._batches,
            )
        ]
        truncated_queries = sum(query.truncated for query in queries)
        truncated = truncated_queries + documents.truncated
        of_values = summed_parts(num_values) if self._windows_as_one else best_windows(num_values)
        combine = shared_scores(of_values, documents.position_of)
        rows = _query_rows(request, queries) if self._windows_as_one else None
        images = image_jobs(self._vision, sequences)
        prepared = Prepared(
            sequences,
            sum(num_values),
            truncated,
            combine,
            batches,
            images,
            query_rows=rows,
            truncated_queries=truncated_queries,
            encoded_before=all_before(queries),
            overflow_check=self._overflow_check(request, documents, num_values),
        )
        if not request.explain:
            return prepared
        sides = Side(request.queries, builder), Side(request.documents, reader.builder)
        return self._explained(prepared, request, sides, documents, num_values)

    def _num_parts(self, request: ScoreRequest, document: Document, queries: Sequence[Query]) -> int:
        """Returns in how many parts of its query a document is scored: more than one only if its embedding is
        cached or was sent, and the comparison exceeds the limit of a batch."""
        if not self._windows_as_one or not isinstance(document, DocumentInCache):
            return 1
        query_rows = queries[document.query].num_rows
        if query_rows <= self._price.usual_query_rows and not request.explain:
            return 1
        times = 1 + EXPLAINED if request.explain else 1
        return self._price.parts(query_rows, document.num_rows, self._batches.rows, times)

    def _check_pairs(self, documents: Documents, query_rows: Sequence[int]) -> None:
        """Refuses a document that has too many vectors to be compared with those of its query at once. Raises
        InvalidRequestError."""
        if self._limits.most_vectors is None:
            return
        most = self._limits.most_vectors**2
        for position, document in enumerate(documents.different):
            if query_rows[document.query] * document.num_rows > most:
                raise InvalidRequestError(
                    f"documents[{documents.position_of.index(position)}] has {document.num_rows} vectors and "
                    f"its query {query_rows[document.query]}, and at most {most} pairs of them are compared; "
                    "shorten either, or raise max_vectors",
                    "documents",
                )

    def _overflow_check(
        self, request: ScoreRequest, documents: Documents, num_values: Sequence[int]
    ) -> OverflowCheck | None:
        """Returns what finds embeddings that cause scores that are not finite; None without embeddings."""
        if not any(isinstance(each, Vectors) for each in (*request.queries, *request.documents)):
            return None
        starts = np.array([*accumulate(num_values, initial=0)])
        _, firsts = np.unique(documents.position_of, return_index=True)
        return OverflowCheck(request, starts, firsts)

    def _explained(
        self,
        prepared: Prepared,
        request: ScoreRequest,
        sides: tuple[Side, Side],
        documents: Documents,
        num_values: Sequence[int],
    ) -> Prepared:
        """The same, for a request that asks how documents came to their scores."""
        check_explained(request, documents, prepared.query_rows)
        explainer = EncodedExplainer(
            request,
            *sides,
            documents,
            self._tokenizer,
            [*accumulate(num_values, initial=0)],
            self._similarity == "meanmaxsim",
        )
        return replace(prepared, combine=FirstNumbers(prepared.combine), explain=explainer)

    def _how_explained(self, request: ScoreRequest, document: Document) -> Explained | None:
        """By the rows of a document's windows, if its matches are asked for, and by maps of its pictures."""
        if not request.explain or not self._windows_as_one:
            return None
        return Explained(document.window_rows, with_map=request.maps and document.tokens_of_page is not None)

    def encode_query(self, request: ScoreRequest, ids: RequestIds) -> Prepared:
        return self._queries.prepare(request, ids)

    def shortest_sequences(self) -> dict[str, int]:
        return {
            "a query": shortest_text(self._query_rules, self._tokenizer),
            "a document": shortest_text(self._document_rules, self._tokenizer),
        }

    def _reader(self, request: ScoreRequest, long_inputs: LongInputs) -> DocumentReader:
        builder = TextBuilder(
            self._tokenizer, self._document_rules, long_inputs, "documents", long_inputs.max_document_tokens
        )
        if self._cache is None or request.cache == "bypass":
            return DocumentReader(builder, None, self._given, self._pages)
        refresh, owner = request.cache == "refresh", request.cache_owner
        lookup = CacheLookup(self._cache, refresh, long_inputs, builder.own_length, owner)
        return DocumentReader(builder, lookup, self._given, self._pages)

    def _scored_as_one(
        self,
        document: DocumentToRun,
        query: Query,
        index: int,
        ids: RequestIds,
        explained: Explained | None,
    ) -> list[TokenSequence]:
        """The sequences of a document of which all windows together have the score `index`."""
        sequence_ids = [ids.next_sequence_id() for _ in document.windows]
        times = 1 if explained is None else 1 + EXPLAINED
        window = Window(sequence_ids[0], len(sequence_ids)) if len(sequence_ids) > 1 else None
        payload = DocumentPayload(
            query.id, document.cache_key, document.truncated, window, query.given, explained
        )
        return [
            TokenSequence.document(
                sequence_id,
                ids.slot(index),
                self._task,
                built.tokens,
                payload,
                self._price.extra_tokens(query.num_rows, built.num_rows, times),
            )
            for sequence_id, built in zip(sequence_ids, document.windows, strict=True)
        ]

    def _scored_apart(
        self, document: DocumentToRun, query: Query, first: int, ids: RequestIds
    ) -> list[TokenSequence]:
        """The sequences of a document of which each window has a score, from the score `first` on. A document
        is cached only where it is one sequence."""
        cache_key = document.cache_key if len(document.windows) == 1 else None
        payload = DocumentPayload(query.id, cache_key, document.truncated, given_query=query.given)
        return [
            TokenSequence.document(
                ids.next_sequence_id(),
                ids.slot(first + i),
                self._task,
                built.tokens,
                payload,
                self._price.extra_tokens(query.num_rows, built.num_rows),
            )
            for i, built in enumerate(document.windows)
        ]


def in_batches(
    documents: Sequence[CachedDocument],
    query_id: int,
    query_rows: int,
    price: ScoringPrice,
    *,
    given_query: torch.Tensor | None = None,
    query_part: tuple[int, int | None] | None = None,
    limits: BatchLimits = ON_HOST,
) -> Iterator[CachedBatch]:
    """Cached documents of one query in batches within the limits, or of one document. They are compared with
    `query_rows` rows of it: all, or the `query_part`."""
    batch: list[CachedDocument] = []
    rows = 0.0

    def priced() -> CachedBatch:
        request_id, columns = batch[0].slot.request_id, CachedDocuments.of(batch)
        tokens = price.tokens(rows, len(batch))
        return CachedBatch(request_id, query_id, tokens, columns, given_query, query_part)

    for document in documents:
        times = 1 if document.explained is None else 1 + EXPLAINED
        counted = price.rows(query_rows, len(document.embedding.rows), times)
        if batch and (rows + counted > limits.rows or len(batch) == limits.documents):
            yield priced()
            batch, rows = [], 0.0
        batch.append(document)
        rows += counted
    if batch:
        yield priced()


def _parts_of(query: Query, count: int) -> list[Part]:
    """A query's rows in so many parts of nearly the same size; [None] for one. The last has all that is
    left."""
    if count == 1:
        return [None]
    cuts = [query.num_rows * i // count for i in range(count + 1)]
    stops = [*cuts[1:-1], None]
    return [(start, stop, end - start) for start, stop, end in zip(cuts, stops, cuts[1:], strict=False)]


def _query_rows(request: ScoreRequest, queries: Sequence[Query]) -> NDArray[np.int64]:
    """Of the query of each document, how many tokens are scored."""
    rows = np.array([query.num_rows for query in queries])
    return rows if len(rows) > 1 else np.repeat(rows, len(request.documents))
