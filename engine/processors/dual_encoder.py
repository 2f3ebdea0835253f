"""Dual encoders (late interaction, bi-encoders, sparse models): queries and documents are encoded separately.

Late interaction: score(q, d) = sum over i of max over j of <q_i, d_j> (Khattab, Zaharia; arXiv 2004.12832).
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.checkpoint.model import TOKEN_CLASSIFY
from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.explanations import Explanation, Span, TokenMatch, WindowScore
from maxsimd.engine.media import Content
from maxsimd.engine.processors.documents import (
    CacheKeys,
    CacheLookup,
    Document,
    DocumentReader,
    Documents,
    GivenVectors,
    overflow_error,
)
from maxsimd.engine.processors.pages import PageBuilder, maps_of, page_builder, patch_of
from maxsimd.engine.processors.processor import (
    Plan,
    PlanValues,
    PriorEncoding,
    Processor,
    ProcessorContext,
    RequestIds,
    ScorePlan,
    ScoreProcessor,
    Scores,
    check_explained_lines,
)
from maxsimd.engine.processors.text.builder import (
    BuiltText,
    InputName,
    LongInputs,
    TextBuilder,
    shortest_text,
)
from maxsimd.engine.processors.text.tokenization import Origins, TextTokenizer
from maxsimd.engine.requests import DocumentDigest, Item, ScoreRequest, Values
from maxsimd.engine.scoring.maxsim import EMPTY_DOCUMENT_SCORE
from maxsimd.engine.scoring.scorer import EXPLAINED, CachedDocument, CachedDocuments, ScoringPrice
from maxsimd.engine.scoring.similarity import matches_of, similarities_of
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.pooling.query_rows import QueryRows
from maxsimd.pooling.ragged import runs
from maxsimd.pooling.vectors import Vectors
from maxsimd.scheduler import CachedBatch, DocumentPayload, Explained, Role, TokenSequence, Window

# Writing one match takes as long as reading this many characters.
_CHARACTERS_PER_MATCH = 64

# The most matches in all windows of a request's documents; a few bytes each.
MOST_NOTED = 2_000_000
# The most numbers in the maps of a request's documents.
MOST_MAPPED = 2_000_000
# The most characters shown of a token: some tokenizers make one of any long word. Its span has all.
_MOST_SHOWN = 100


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The most rows, as `ScoringPrice` counts them, and documents of a batch of cached documents."""

    rows: int
    documents: int


# A part of a query's rows: the first, and the one after the last; None for all rows.
Part: TypeAlias = tuple[int, int] | None

ON_HOST = BatchLimits(16_384, 512)
# On the device a batch costs little more than its launch. Embeddings that must be copied first take 128 MiB a
# batch, in float32 of 128 dimensions.
IN_SLAB = BatchLimits(262_144, 4096)


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A query by its sequence id: built here, or sent as rows [tokens, dim], `prior` if encoded earlier."""

    id: int
    built: BuiltText | torch.Tensor
    prior: PriorEncoding

    @property
    def given(self) -> torch.Tensor | None:
        return None if isinstance(self.built, BuiltText) else self.built

    @property
    def truncated(self) -> bool:
        return self.built.truncated if isinstance(self.built, BuiltText) else self.prior.truncated > 0

    @property
    def num_rows(self) -> int:
        """The number of its tokens that are scored."""
        return self.built.num_rows if isinstance(self.built, BuiltText) else len(self.built)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueryPlan(Plan):
    """A query to encode by itself."""

    model: LoadedModel

    def input_of(self, value: int) -> str:
        return f"queries[{value}]"

    def result(self, values: Values, dtype: torch.dtype) -> QueryRows:
        """Makes the query's embedding: token vectors in `dtype`, or one vector in float32."""
        rows = torch.from_numpy(np.array(values.values[0], dtype=np.float32))
        return QueryRows(
            rows.to(dtype) if self.model.score_task == "token_embed" else rows,
            tokens=self.usage.query_tokens,
            truncated=self.truncated > 0,
            fingerprint=self.model.fingerprint,
        )


class QueryProcessor(Processor[ScoreRequest, QueryPlan]):
    """Builds the sequences of queries, and checks those that are sent as embeddings."""

    def __init__(self, context: ProcessorContext, given: GivenVectors, pages: PageBuilder | None) -> None:
        super().__init__(context)
        self._given = given
        self._pages = pages

    def prepare(self, request: ScoreRequest, ids: RequestIds) -> QueryPlan:
        """Returns the plan for the queries of a request without documents."""
        request = self._context.with_instruction(request)
        builder = self.builder(request, self._limits.applied_to(request.truncation, ids.most_tokens))
        built = [each.built for each in self.read(request, builder, ids) if isinstance(each.built, BuiltText)]
        task = self._model.score_task
        sequences = [
            TokenSequence.text(ids.next_sequence_id(), ids.slot(i), task, each.tokens, Role.QUERY)
            for i, each in enumerate(built)
        ]
        return QueryPlan(
            sequences=sequences,
            num_values=len(built),
            truncated=sum(each.truncated for each in built),
            images=self._image_jobs(sequences),
            model=self._model,
        )

    def builder(self, request: ScoreRequest, long_inputs: LongInputs) -> TextBuilder:
        rules = self._model.query
        if request.instruction is not None:
            rules = rules.instructed(request.instruction)
        return TextBuilder(self._tokenizer, rules, long_inputs, "queries")

    def read(self, request: ScoreRequest, builder: TextBuilder, ids: RequestIds) -> list[Query]:
        texts = {i: text for i, text in enumerate(request.queries) if isinstance(text, str)}
        encoded = builder.encode([*texts.values()], texts)
        built = {i: builder.build(text, i) for i, text in zip(texts, encoded, strict=True)}
        built |= self._read_pages(request, builder.rules, ids)
        queries = []
        for i, query in enumerate(request.queries):
            rows = self._given.query(query, i) if isinstance(query, Vectors) else built[i]
            prior = PriorEncoding()
            if isinstance(query, QueryRows):
                prior = PriorEncoding(query.tokens, int(query.truncated))
            queries.append(Query(ids.next_sequence_id(), rows, prior))
        return queries

    def _read_pages(self, request: ScoreRequest, rules: RoleRules, ids: RequestIds) -> dict[int, BuiltText]:
        """Returns the queries with pictures, by their index."""
        pages: dict[int, BuiltText] = {}
        for i, query in enumerate(request.queries):
            if isinstance(query, Content):
                assert self._pages is not None
                name = InputName("queries", i)
                opened = self._pages.opened(query, name)
                pages[i] = self._pages.built(opened, rules, name, ids)
                ids.check_tokens(sum(len(page.tokens) for page in pages.values()))
        return pages


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DualEncoderPlan(ScorePlan):
    """The values of different document i are `first_values[i]` to `first_values[i + 1]`. With
    `windows_as_one` they are summed, one for each part of a long query, and `query_rows` has the token
    vectors of each document's query. Else there is one for each window, and the best counts."""

    documents: Documents
    first_values: Sequence[int]
    windows_as_one: bool
    query_rows: NDArray[np.int64] | None
    # The largest number of each query that was sent as an embedding, by its index.
    largest: Mapping[int, float]
    # The queries and documents, if scores are explained; of means of similarities, not sums, if `is_mean`.
    texts: "tuple[FieldTexts, FieldTexts] | None" = None
    is_mean: bool = False

    def raw_scores(self, values: PlanValues) -> Scores:
        if self.texts is not None:
            # Matches stand behind the score.
            values = [float(value.flat[0]) if isinstance(value, np.ndarray) else value for value in values]
        position_of = self.documents.position_of
        scores: Scores
        if self.num_values == len(self.documents.different):
            scores = np.array(values, dtype=np.float32)
        elif self.windows_as_one:
            sums = np.add.reduceat(np.array(values, dtype=np.float64), self.first_values[:-1])
            scores = sums.astype(np.float32)
        else:
            scores = np.maximum.reduceat(np.array(values, dtype=np.float32), self.first_values[:-1])
        # Equal documents share a score.
        return scores if len(scores) == len(position_of) else scores[position_of]

    def final_scores(self, raw: Scores) -> Scores:
        return raw if self.normalization is None else self.normalization.apply(raw, self.query_rows)

    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        positions = {self._position_of(value) for value in values}
        return [i for i, position in enumerate(self.documents.position_of) if position in positions]

    def refusal_of(self, value: int) -> InvalidRequestError | None:
        document = self.documents.firsts[self._position_of(value)]
        return overflow_error(self.request, document, self.largest)

    def explanations(self, values: PlanValues, documents: Iterable[int]) -> dict[int, Explanation]:
        # Equal documents share one.
        of_position: dict[int, Explanation | None] = {}
        explained: dict[int, Explanation] = {}
        for document in documents:
            yield_to_smaller()
            position = self.documents.position_of[document]
            if position not in of_position:
                of_position[position] = self._explain(values, document)
            if (explanation := of_position[position]) is not None:
                explained[document] = explanation
        return explained

    def explanation_size(self, documents: Iterable[int]) -> int:
        indices = np.fromiter(documents, dtype=np.int64)
        size = ScorePlan.explanation_size(self, indices.tolist())
        if self.query_rows is None:
            return size
        different, position_of = self.documents.different, self.documents.position_of
        named = sum([_num_named(self.request, different[position_of[i]]) for i in indices.tolist()])
        return size + _CHARACTERS_PER_MATCH * (named + int(self.query_rows[indices].sum()))

    def _position_of(self, value: int) -> int:
        """Returns which different document a value is of."""
        return bisect_right(self.first_values, value) - 1

    def _explain(self, values: PlanValues, index: int) -> Explanation | None:
        """Explains document `index` of the request; None if it has no score."""
        assert self.texts is not None
        _, of_documents = self.texts
        position = self.documents.position_of[index]
        document = self.documents.different[position]
        first = self.first_values[position]
        value = values[first]
        maps: tuple[NDArray[np.float32], ...] = ()
        similarities: NDArray[np.float32] | None = None
        document_tokens: tuple[str | None, ...] = ()
        if isinstance(value, np.ndarray):
            rows = document.window_rows
            tokens = document.tokens_of_page
            how = Explained(rows, with_map=self.request.maps)
            # One for each part of a long query.
            parts = values[first : self.first_values[position + 1]]
            if any(part is None for part in parts):
                return None
            found = np.concatenate([matches_of(np.asarray(part), how) for part in parts])
            if how.with_map:
                of_all = np.concatenate([similarities_of(np.asarray(part), how) for part in parts])
                if tokens is not None:
                    maps = maps_of(tokens, of_all)
                else:
                    similarities, num_rows = of_all, of_all.shape[1]
                    document_tokens = tuple([of_documents.token(index, i)[0] for i in range(num_rows)])
            sums = found[:, :, 1].sum(axis=0, dtype=np.float64) / (max(1, len(found)) if self.is_mean else 1)
            # A window without a vector has the score of an empty document.
            scores = np.where(np.array(rows) > 0, sums, EMPTY_DOCUMENT_SCORE).tolist()
            there = np.where(found[:, :, 0] < 0, -np.inf, found[:, :, 1])  # [Lq, windows]
            matches = self._matches(index, found[np.arange(len(found)), there.argmax(axis=1)])
        else:
            scores = values[first : first + document.num_consumers]
            matches = ()
        if None in scores:
            return None
        windows: list[WindowScore] = []
        rows_of = of_documents.rows(index) if len(scores) > 1 or document.truncated else None
        if rows_of is not None and len(scores) > 1:
            extents = [origins.extent or (0, 0) for origins in rows_of[0]]
            final = np.array(scores, dtype=np.float32)
            if self.normalization is not None:
                query_rows = None if self.query_rows is None else self.query_rows[[index] * len(final)]
                final = self.normalization.apply(final, query_rows)
            windows = [WindowScore(*each) for each in zip(extents, final.tolist(), strict=True)]
        read_span = rows_of[1].extent if rows_of is not None and document.truncated else None
        return Explanation(
            document.tokens,
            document.truncated,
            document.is_cached,
            matches,
            tuple(windows),
            maps,
            read_span,
            similarities,
            document_tokens,
        )

    def _matches(self, index: int, best: NDArray[np.float32]) -> tuple[TokenMatch, ...]:
        """Returns a document's matches; `best` [Lq, 2] has the row and similarity of each."""
        if len(best) == 0 or (best[:, 0] < 0).any():
            return ()
        assert self.texts is not None
        of_queries, of_documents = self.texts
        query_index = self.request.query_of(index)
        page = self.documents.different[self.documents.position_of[index]].tokens_of_page
        total = float(best[:, 1].sum(dtype=np.float64))
        matches = []
        for i, (row, similarity) in enumerate(best.tolist()):
            query_token, query_span = of_queries.token(query_index, i)
            token, span = of_documents.token(index, int(row))
            share = similarity / total if total else 0.0
            patch = None if page is None else patch_of(page, int(row))
            matches.append(
                TokenMatch(query_token, query_span, token, span, int(row), similarity, share, patch)
            )
        return tuple(matches)


class DualEncoderProcessor(ScoreProcessor):
    """Runs queries first, then new documents. Cached ones are scored in batches.

    With token embeddings the windows of a document are scored as one, which is exact: MaxSim is a maximum
    over the union of their tokens. Else each window has a score, and the best counts."""

    takes_vectors = True

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        model = context.model
        assert context.score_cache is None
        self._cache = context.embedding_cache
        self._windows_as_one = model.score_task == "token_embed"
        self._batches = ON_HOST if self._cache is None or self._cache.slab is None else IN_SLAB
        self._given = GivenVectors(model, context.limits.most_vectors, context.scored_in)
        self._price = ScoringPrice.of(model)
        self._pages = page_builder(model, context.tokenizer, context.limits.longest_sequence)
        self.queries = QueryProcessor(context, self._given, self._pages)

    @classmethod
    def is_for(cls, model: LoadedModel) -> bool:
        is_apart = not model.reads_pairs and model.listwise is None
        return is_apart and model.score_task != TOKEN_CLASSIFY

    def plan(self, request: ScoreRequest, ids: RequestIds) -> DualEncoderPlan:
        if request.explain and self._model.token_pooling is not None:
            raise InvalidRequestError(
                "explain is not possible: this model's vectors of documents are merged (token pooling) and "
                "stand for no single token; leave it out",
                "explain",
            )
        long_inputs = self._limits.applied_to(request.truncation, ids.most_tokens)
        builder = self.queries.builder(request, long_inputs)
        of_documents = self._builder(long_inputs)
        lookup = None
        if self._cache is not None and request.cache != "bypass":
            lookup = CacheLookup(self._cache, request.cache == "refresh", of_documents, request.cache_owner)
        reader = DocumentReader(of_documents, lookup, self._given, self._pages, self._kept(request))
        documents = reader.read(request, ids)
        queries = self.queries.read(request, builder, ids)
        if self._windows_as_one:
            self._check_pairs(documents, [query.num_rows for query in queries])
        num_parts = [self._num_parts(request, document, queries) for document in documents.different]
        num_consumers = [0] * len(queries)
        for document, parts in zip(documents.different, num_parts, strict=True):
            num_consumers[document.query] += document.num_consumers * parts
        task = self._model.score_task
        sequences = [
            TokenSequence.query(query.id, ids.request_id, task, query.built.tokens, consumers)
            for query, consumers in zip(queries, num_consumers, strict=True)
            if isinstance(query.built, BuiltText)
        ]
        cached: dict[tuple[Query, torch.dtype, Part], list[CachedDocument]] = {}
        num_values = num_parts
        if not self._windows_as_one:
            num_values = [document.num_consumers for document in documents.different]
        first_values = list(accumulate(num_values, initial=0))
        for document, parts, first in zip(documents.different, num_parts, first_values, strict=False):
            query = queries[document.query]
            explained = None
            if request.explain and self._windows_as_one:
                explained = Explained(document.window_rows, with_map=request.maps)
            if document.embedding is not None:
                for i, part in enumerate(_parts_of(query, parts)):
                    found = CachedDocument(ids.slot(first + i), document.embedding, explained)
                    # Sent and cached embeddings may have different precisions.
                    cached.setdefault((query, document.embedding.rows.dtype, part), []).append(found)
            else:
                sequences += self._sequences_of(document, query, first, ids, explained)
        query_rows = None
        if self._windows_as_one and (request.normalize or request.explain):
            rows = np.array([query.num_rows for query in queries])
            query_rows = rows if len(rows) > 1 else np.repeat(rows, len(request.documents))
        explained_texts = None
        if request.explain:
            check_explained(request, documents, query_rows)
            explained_texts = (
                FieldTexts(request.queries, builder, self._tokenizer),
                FieldTexts(request.documents, of_documents, self._tokenizer),
            )
        priors = [query.prior for query in queries]
        truncated_queries = sum([query.truncated for query in queries])
        return DualEncoderPlan(
            sequences=sequences,
            num_values=first_values[-1],
            truncated=truncated_queries + documents.truncated,
            cached=[
                batch
                for (query, _, part), found_documents in cached.items()
                for batch in in_batches(
                    found_documents,
                    query.id,
                    query.num_rows if part is None else part[1] - part[0],
                    self._price,
                    given_query=query.given,
                    query_part=part,
                    limits=self._batches,
                )
            ],
            images=self._image_jobs(sequences),
            prior=PriorEncoding(
                sum(prior.tokens for prior in priors), sum(prior.truncated for prior in priors)
            ),
            request=request,
            truncated_queries=truncated_queries,
            normalization=self._normalization(request),
            documents=documents,
            first_values=first_values,
            windows_as_one=self._windows_as_one,
            query_rows=query_rows,
            largest={
                i: query.largest
                for i, query in enumerate(request.queries)
                if isinstance(query, Vectors) and len(query)
            },
            texts=explained_texts,
            is_mean=self._model.similarity == "meanmaxsim",
        )

    def unknown_among(self, digests: Sequence[DocumentDigest], request: ScoreRequest) -> set[DocumentDigest]:
        if self._cache is None:
            return super().unknown_among(digests, request)
        builder = self._builder(self._limits.applied_to(request.truncation))
        lookup = CacheLookup(self._cache, False, builder, request.cache_owner)
        found = zip(digests, lookup.find(digests, counts=False), strict=True)
        return super().unknown_among(
            [digest for digest, entry in found if isinstance(entry, CacheKeys)], request
        )

    def _builder(self, long_inputs: LongInputs) -> TextBuilder:
        return TextBuilder(self._tokenizer, self._model.document, long_inputs, "documents")

    def shortest_sequences(self) -> dict[str, int]:
        roles = {"a query": self._model.query, "a document": self._model.document}
        return {name: shortest_text(rules, self._tokenizer) for name, rules in roles.items()}

    def _num_parts(self, request: ScoreRequest, document: Document, queries: Sequence[Query]) -> int:
        """Returns into how many parts of its query a document's comparison is divided: several only if its
        embedding is there and the comparison exceeds a batch."""
        if not self._windows_as_one or document.embedding is None:
            return 1
        query_rows = queries[document.query].num_rows
        if query_rows <= self._price.usual_query_rows and not request.explain:
            return 1
        times = 1 + EXPLAINED if request.explain else 1
        return self._price.parts(query_rows, document.num_rows, self._batches.rows, times)

    def _check_pairs(self, documents: Documents, query_rows: Sequence[int]) -> None:
        """Raises InvalidRequestError if too many pairs of vectors would be compared at once."""
        if self._limits.most_vectors is None:
            return
        most = self._limits.most_vectors**2
        for position, document in enumerate(documents.different):
            if query_rows[document.query] * document.num_rows > most:
                raise InvalidRequestError(
                    f"documents[{documents.firsts[position]}] has {document.num_rows} vectors and "
                    f"its query {query_rows[document.query]}, and at most {most} pairs of them are compared; "
                    "shorten either, or raise max_vectors",
                    "documents",
                )

    def _sequences_of(
        self, document: Document, query: Query, first: int, ids: RequestIds, explained: Explained | None
    ) -> list[TokenSequence]:
        """Returns the sequences of a document, which share the value `first` or have one each from there."""
        as_one, is_whole = self._windows_as_one, len(document.windows) == 1
        sequence_ids = [ids.next_sequence_id() for _ in document.windows]
        window = Window(sequence_ids[0], len(sequence_ids)) if as_one and not is_whole else None
        # A document whose windows are scored separately is cached only if it is one sequence.
        cache_key = document.cache_key if as_one or is_whole else None
        payload = DocumentPayload(query.id, cache_key, document.truncated, window, query.given, explained)
        times = 1 if explained is None else 1 + EXPLAINED
        return [
            TokenSequence.document(
                sequence_id,
                ids.slot(first if as_one else first + i),
                self._model.score_task,
                built.tokens,
                payload,
                self._price.extra_tokens(query.num_rows, built.num_rows, times),
            )
            for i, (sequence_id, built) in enumerate(zip(sequence_ids, document.windows, strict=True))
        ]


def in_batches(
    documents: Sequence[CachedDocument],
    query_id: int,
    query_rows: int,
    price: ScoringPrice,
    *,
    given_query: torch.Tensor | None = None,
    query_part: Part = None,
    limits: BatchLimits = ON_HOST,
) -> Iterator[CachedBatch]:
    """Yields batches of one query's cached documents within the limits, or of one document. They are
    compared with `query_rows` rows of the query: all, or the `query_part`."""
    times = [1 if document.explained is None else 1 + EXPLAINED for document in documents]
    rows = [
        price.rows(query_rows, len(document.embedding.rows), each)
        for document, each in zip(documents, times, strict=True)
    ]
    for run in runs(rows, limits.rows, limits.documents):
        batch = documents[run]
        request_id, columns = batch[0].slot.request_id, CachedDocuments.of(batch)
        tokens = price.tokens(sum(rows[run]), len(batch))
        yield CachedBatch(request_id, query_id, tokens, columns, given_query, query_part)


def _parts_of(query: Query, count: int) -> list[Part]:
    """Divides a query's rows into parts of nearly the same size; [None] for one part."""
    bounds = [query.num_rows * i // count for i in range(count + 1)]
    return [None] if count == 1 else list(pairwise(bounds))


@dataclass(frozen=True, slots=True, eq=False)
class FieldTexts:
    """The texts of one field, their builder, and the rows of the text that was looked up last."""

    texts: Sequence[Item]
    builder: TextBuilder
    tokenizer: TextTokenizer
    last: dict[int, tuple[list[Origins], Origins]] = field(default_factory=dict)

    def rows(self, index: int) -> tuple[list[Origins], Origins] | None:
        """Returns a text's rows by window, and all; None for pictures and embeddings."""
        text = self.texts[index]
        if isinstance(text, str) and index not in self.last:
            yield_to_smaller()
            of_windows = self.builder.origins(text, index)
            self.last.clear()
            self.last[index] = of_windows, Origins.join(of_windows)
        return self.last[index] if isinstance(text, str) else None

    def token(self, index: int, row: int) -> tuple[str | None, Span | None]:
        """Returns a token as written in its text, or as in the vocabulary, and its span."""
        text, rows = self.texts[index], self.rows(index)
        if not isinstance(text, str) or rows is None:
            return None, None
        span = rows[1].span(row, text)
        if span is None:
            return self.tokenizer.token(int(rows[1].ids[row])), None
        return text[span[0] : min(span[1], span[0] + _MOST_SHOWN)], span


def _num_named(request: ScoreRequest, document: Document) -> int:
    """Returns the number of a document's tokens that its explanation names."""
    if not request.maps or document.tokens_of_page is not None:
        return 0
    return sum(document.window_rows)


def check_explained(request: ScoreRequest, read: Documents, query_rows: NDArray[np.int64] | None) -> None:
    """Raises RequestTooLargeError for too large explanations, of matches of so many `query_rows`."""
    windows = [len(each.window_rows) for each in read.different]
    rows = [0] * len(read.position_of) if query_rows is None else query_rows.tolist()
    own = [count if count > 1 else 0 for count in windows]
    if query_rows is not None:
        own = [count + _num_named(request, each) for count, each in zip(own, read.different, strict=True)]
    of_documents = list(zip(rows, read.position_of, strict=True))
    lines = (row + own[position] for row, position in of_documents)
    check_explained_lines(request.explain, lines)
    if query_rows is None:
        return
    if request.maps:
        document_rows = [sum(each.window_rows) for each in read.different]
        mapped = sum(row * document_rows[position] for row, position in of_documents)
        if mapped > MOST_MAPPED:
            raise RequestTooLargeError(
                f"explain would map {mapped} similarities for these documents, and at most {MOST_MAPPED} are "
                "mapped; send fewer documents, or explain without maps"
            )
    # Each query vector is matched in each window. Equal documents have one position and one query.
    rows_of = {position: row for row, position in of_documents}
    noted = sum(rows_of[position] * count for position, count in enumerate(windows))
    if noted > MOST_NOTED:
        raise RequestTooLargeError(
            f"explain would note {noted} matches for these documents, and at most {MOST_NOTED} are noted; "
            "send fewer documents, or leave explain out"
        )
