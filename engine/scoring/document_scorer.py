"""Scores documents against queries on the device: documents just pooled, documents read through windows once
they are complete, and documents whose embeddings are cached."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from maxsimd.engine.cache import About, Arriving, CachedEmbedding, EmbeddingCache
from maxsimd.engine.scoring.asked import Asked
from maxsimd.engine.scoring.documents import CachedDocuments, CacheHit, Duplicate, SkippedSequence
from maxsimd.engine.scoring.matches import score_with_matches
from maxsimd.engine.scoring.maxsim import MaxSim, MaxSimApart, MaxSimSpans
from maxsimd.engine.scoring.outcome import Output, Releases, RequestFailure
from maxsimd.engine.scoring.query_store import QueryStore
from maxsimd.engine.scoring.similarity import TOKEN_SIMILARITIES, as_named, score_pairs
from maxsimd.engine.scoring.window_store import WindowStore
from maxsimd.pooling.dispatch import Pooled
from maxsimd.pooling.ragged import Ragged, Spans, decoded, joined_on, to_device
from maxsimd.scheduler import CachedBatch, DocumentPayload, Explained, ResultSlot, TokenSequence

_NO_QUERY = "the query's embedding is no longer stored"


@dataclass(frozen=True, slots=True)
class _Target:
    """The query that a document is scored against, where its score goes, and as how many consumers of the
    query it counts. A `given_query` came as its embedding, and is not stored. `explained` says how the
    score is to be explained, if it is."""

    query_id: int
    slot: ResultSlot
    consumers: int = 1
    given_query: torch.Tensor | None = None
    explained: Explained | None = None


@dataclass(slots=True, eq=False)
class ScoredDocuments:
    """What one call of `DocumentScorer.score` makes; complete when it returns."""

    outputs: list[Output] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    new_embeddings: list[Arriving] = field(default_factory=list)
    consumers: Counter[int] = field(default_factory=Counter)
    complete: set[int] = field(default_factory=set)

    def add(self, scores: torch.Tensor, slots: tuple[ResultSlot, ...]) -> None:
        self.outputs.append(Output(slots, Ragged.one_row_each(scores[:, None]), scalar=True))

    @property
    def releases(self) -> Releases:
        return Releases(dict(self.consumers), frozenset(self.complete))


class DocumentScorer:
    """Owns the queries whose documents are still to come, and documents of which windows are missing.

    Documents are compared on `device` in the precision `dtype`, or as int8 where they are cached so and
    `takes_int8` says that `maxsim` reads it. Cached ones are compared where they lie on the host, if there is
    a `maxsim_apart` that can, or in the cache's slab on the device, by `maxsim_spans` if there is one, else
    end to end. Used by the scoring actor alone."""

    def __init__(
        self,
        similarity: str,
        maxsim: MaxSim,
        device: torch.device,
        dtype: torch.dtype,
        *,
        takes_int8: bool = False,
        maxsim_apart: MaxSimApart | None = None,
        maxsim_spans: MaxSimSpans | None = None,
        cache: EmbeddingCache | None = None,
    ) -> None:
        self._similarity = similarity
        self._maxsim = maxsim
        self._maxsim_apart = maxsim_apart if similarity in TOKEN_SIMILARITIES else None
        self._maxsim_spans = maxsim_spans if similarity in TOKEN_SIMILARITIES else None
        self._takes_int8 = takes_int8 and similarity in TOKEN_SIMILARITIES
        self.device = device
        self._dtype = dtype
        self._cache = cache
        self._slab = None if cache is None else cache.slab
        self.queries = QueryStore()
        self.windows = WindowStore()

    def score(
        self, pooled: Sequence[Pooled], skipped: Sequence[SkippedSequence], cached: Sequence[CachedBatch]
    ) -> ScoredDocuments:
        """Scores all documents that a step completes: one batch a task, whatever requests they belong to.

        Stores the step's queries and windows by their ids, and releases nothing, which `commit` does once the
        scores are delivered. Before it is called again for sequences of a step that failed, `forget` must be
        called with their ids."""
        made = ScoredDocuments()
        new_rows: dict[bytes, tuple[Ragged, int]] = {}
        for task in pooled:
            self._store_queries(task)
            documents, items = self._complete_documents(task, made)
            for part, rows in self._quantise_and_stage_for_cache(documents, items, new_rows, made):
                self._against_queries([_target(document) for document in part], rows, made)
        self._score_skipped(skipped, new_rows, made)
        for batch in cached:
            self._score_batch(batch, made)
        return made

    def forget(self, sequence_ids: Collection[int]) -> None:
        """Forgets the windows that a failed attempt has stored. Its queries the next one overwrites."""
        self.windows.forget(sequence_ids)

    def commit(self, releases: Releases) -> None:
        """Releases the queries and the complete documents that a delivered step has used up."""
        for query_id, consumers in releases.queries.items():
            self.queries.release(query_id, consumers)
        for document_id in releases.documents:
            self.windows.release(document_id)

    def drop_request(self, request_id: int) -> None:
        """Forgets all that belongs to a request that has ended."""
        self.queries.drop_request(request_id)
        self.windows.drop_request(request_id)

    def _store_queries(self, pooled: Pooled) -> None:
        for i, sequence in enumerate(pooled.sequences):
            if sequence.num_consumers:
                self.queries.put(sequence, pooled.items[i])

    def _complete_documents(
        self, pooled: Pooled, made: ScoredDocuments
    ) -> tuple[list[TokenSequence], Ragged]:
        """The documents that are complete with this step, and their embeddings. A document that is read
        through windows is complete when its last window is there."""
        payloads = [sequence.payload.document for sequence in pooled.sequences]
        if all(document is None or document.window is None for document in payloads):
            there = [i for i, document in enumerate(payloads) if document is not None]
            return [pooled.sequences[i] for i in there], pooled.items.take(there)
        documents, items = [], []
        for (sequence, item), document in zip(pooled, payloads, strict=True):
            if document is None:
                continue
            whole: torch.Tensor | None = item
            if document.window is not None:
                whole = self.windows.put(sequence, document.window, item)
            if whole is not None:
                documents.append(sequence)
                items.append(whole)
                if document.window is not None:
                    made.complete.add(document.window.document_id)
        return documents, Ragged.from_items(items) if items else pooled.items

    def _quantise_and_stage_for_cache(
        self,
        documents: list[TokenSequence],
        items: Ragged,
        new_rows: dict[bytes, tuple[Ragged, int]],
        made: ScoredDocuments,
    ) -> list[tuple[list[TokenSequence], Ragged]]:
        """Starts copying new embeddings to the host for the cache, and to the slab.

        Returns the rows to score with: cacheable documents in the cache's precision (so that a hit and a miss
        score identically), others unchanged."""
        if not documents:
            return []
        cacheable = [i for i, document in enumerate(documents) if _cache_key(document) is not None]
        if self._cache is None or not cacheable:
            return [(documents, items)]
        parts = []
        if len(cacheable) < len(documents):
            others = [i for i, document in enumerate(documents) if _cache_key(document) is None]
            parts.append(([documents[i] for i in others], items.take(others)))
            items = items.take(cacheable)
            documents = [documents[i] for i in cacheable]
        rounded = self._cache.rounded(items)
        arriving = Arriving([self._about(document) for document in documents], rounded)
        made.new_embeddings.append(arriving)
        new_rows |= {key: (rounded, i) for i, key in enumerate(arriving.keys)}
        if self._slab is not None:
            self._slab.put(arriving.keys, rounded)
        return [*parts, (documents, rounded)]

    def _about(self, sequence: TokenSequence) -> About:
        document = _document(sequence)
        tokens = len(sequence)
        if document.window is not None:
            tokens = self.windows.tokens(document.window.document_id)
        return About(_required_key(sequence), tokens, document.truncated)

    def _score_skipped(
        self,
        skipped: Sequence[SkippedSequence],
        new_rows: dict[bytes, tuple[Ragged, int]],
        made: ScoredDocuments,
    ) -> None:
        duplicates = [one.sequence for one in skipped if isinstance(one, Duplicate)]
        if duplicates:
            found = [new_rows[_required_key(sequence)] for sequence in duplicates]
            rows = Ragged.join([rounded.item(i) for rounded, i in found])
            self._against_queries([_target(sequence) for sequence in duplicates], rows, made)
        hits = [one for one in skipped if isinstance(one, CacheHit)]
        if hits:
            asked = self._find_queries([_target(hit.sequence) for hit in hits], made)
            entries = [hit.embedding for hit in hits]
            self._score_cached(asked, entries, [entry.key for entry in entries], made)

    def _score_batch(self, batch: CachedBatch, made: ScoredDocuments) -> None:
        """Scores cached documents, all against one query."""
        documents: CachedDocuments = batch.documents
        try:
            query = self._query(batch.waits_for, batch.given_query)
        except KeyError:
            made.failures.append(RequestFailure(batch.request_id, _NO_QUERY))
            return
        made.consumers[batch.waits_for] += len(documents)
        share = 1.0
        if batch.query_part is not None:
            whole, query = query, query[slice(*batch.query_part)]
            share = len(query) / len(whole)
        asked = Asked.of_one(query, documents.slots, documents.explained, share)
        self._score_cached(asked, documents.embeddings, documents.keys, made)

    def _score_cached(
        self,
        asked: Asked,
        entries: Sequence[CachedEmbedding],
        keys: Sequence[bytes | None],
        made: ScoredDocuments,
    ) -> None:
        if self._slab is None:
            self._score_from_host(asked, entries, made)
            return
        located = self._slab.locate(keys, entries)
        if not len(located.absent):
            self._score_spans(asked, located.spans, made)
            return
        self._score_spans(asked.of_documents(located.resident), located.spans, made)
        absent = [entries[i] for i in located.absent.tolist()]
        self._score_from_host(asked.of_documents(located.absent), absent, made)

    def _score_spans(self, asked: Asked, documents: Spans, made: ScoredDocuments) -> None:
        """Scores documents in the slab. All that reads them is launched before this returns."""
        if not len(asked.pairs):
            return
        if self._maxsim_spans is None:
            self._score_asked(asked, documents.gathered(), made)
            return
        queries = asked.queries.decoded(self._dtype)
        scores = as_named(
            self._similarity, self._maxsim_spans(queries, documents, asked.pairs), queries, asked.pairs
        )
        self._add(scores, asked, lambda i: documents.item(i).decoded(self._dtype).values, made)

    def _score_from_host(
        self, asked: Asked, entries: Sequence[CachedEmbedding], made: ScoredDocuments
    ) -> None:
        if self._maxsim_apart is None:
            self._score_asked(asked, self._end_to_end(entries), made)
        elif len(asked.pairs):
            queries = asked.queries.decoded(self._dtype)
            rows = [(entry.rows, entry.scales) for entry in entries]
            scores = self._maxsim_apart(queries, rows, asked.pairs)
            scores = as_named(self._similarity, scores, queries, asked.pairs)
            self._add(scores, asked, lambda i: decoded(*rows[i], self._dtype), made)

    def _end_to_end(self, entries: Sequence[CachedEmbedding]) -> Ragged:
        """Cached embeddings end to end on the device. They travel in the cache's precision."""
        scales = [entry.scales for entry in entries if entry.scales is not None]
        return Ragged.from_lengths(
            joined_on(self.device, [entry.rows for entry in entries]),
            [entry.rows.shape[0] for entry in entries],
            joined_on(self.device, scales) if scales else None,
        )

    def _query(self, query_id: int, given: torch.Tensor | None) -> torch.Tensor:
        """Raises KeyError for one that is not stored, or no longer."""
        if given is None:
            return self.queries.get(query_id)
        rows = to_device(given, self.device)
        # One vector is compared in float32, as a query's that was run here is.
        return rows.to(self._dtype) if self._similarity in TOKEN_SIMILARITIES else rows.float()

    def _against_queries(self, targets: list[_Target], items: Ragged, made: ScoredDocuments) -> None:
        """Scores item i for target i; fails the requests whose queries are no longer stored."""
        self._score_asked(self._find_queries(targets, made), items, made)

    def _score_asked(self, asked: Asked, items: Ragged, made: ScoredDocuments) -> None:
        if not len(asked.pairs):
            return
        if items.scales is None or not self._takes_int8:
            items = items.decoded(self._dtype)
        queries = asked.queries
        if self._similarity in TOKEN_SIMILARITIES:  # which multiply numbers of one precision
            queries = queries.decoded(self._dtype)
        scores = score_pairs(self._similarity, queries, items, asked.pairs, self._maxsim)
        self._add(scores, asked, lambda i: items.item(i).decoded(self._dtype).values, made)

    def _add(
        self,
        scores: torch.Tensor,
        asked: Asked,
        document: Callable[[int], torch.Tensor],
        made: ScoredDocuments,
    ) -> None:
        """Adds the scores of all pairs, those that are to be explained with their matches; `document` gives
        the rows of a document that were scored. Scores of parts of a query are to be added up: where they are
        means, each counts by its share of the rows."""
        is_mean = self._similarity == "meanmaxsim"
        if is_mean and asked.share != 1:
            scores = scores * asked.share
        if not asked.explained:
            made.add(scores, asked.slots)
            return
        with_matches = []
        for i, how in asked.explained.items():
            query, item = asked.pairs[i].tolist()
            embedding = asked.embeddings[query].to(self._dtype)
            share = asked.share if is_mean else None
            with_matches.append(score_with_matches(scores[i], embedding, document(item), how, share))
        slots = tuple(asked.slots[i] for i in asked.explained)
        made.outputs.append(Output(slots, Ragged.from_items(with_matches), scalar=False))
        others = [i for i in range(len(asked.pairs)) if i not in asked.explained]
        if others:
            rows = to_device(torch.tensor(others), scores.device)
            made.add(scores[rows], tuple(asked.slots[i] for i in others))

    def _find_queries(self, targets: list[_Target], made: ScoredDocuments) -> Asked:
        """The query of target i for item i; fails the requests whose queries are no longer stored."""
        position: dict[int, int] = {}
        embeddings: list[torch.Tensor] = []
        pairs: list[tuple[int, int]] = []
        slots: list[ResultSlot] = []
        explained: dict[int, Explained] = {}
        for i, target in enumerate(targets):
            query_id = target.query_id
            if query_id not in position:
                try:
                    embeddings.append(self._query(query_id, target.given_query))
                except KeyError:
                    made.failures.append(RequestFailure(target.slot.request_id, _NO_QUERY))
                    continue
                position[query_id] = len(embeddings) - 1
            if target.explained is not None:
                explained[len(pairs)] = target.explained
            pairs.append((position[query_id], i))
            slots.append(target.slot)
            made.consumers[query_id] += target.consumers
        return Asked(embeddings, np.array(pairs, dtype=np.int64).reshape(-1, 2), tuple(slots), explained)


def _target(sequence: TokenSequence) -> _Target:
    document = _document(sequence)
    assert sequence.payload.slot is not None
    slot, explained = sequence.payload.slot, document.explained
    return _Target(document.query_id, slot, document.num_windows, document.given_query, explained)


def _document(sequence: TokenSequence) -> DocumentPayload:
    assert sequence.payload.document is not None
    return sequence.payload.document


def _cache_key(sequence: TokenSequence) -> bytes | None:
    return _document(sequence).cache_key


def _required_key(sequence: TokenSequence) -> bytes:
    key = _cache_key(sequence)
    assert key is not None
    return key
