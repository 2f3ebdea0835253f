"""Scores a step's documents against their queries: new ones, those read through windows, cached ones."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any, Self, TypeAlias

import numpy as np
import torch

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache, EmbeddingFacts, PendingEmbeddings
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.requests import Value
from maxsimd.engine.scoring.maxsim import Indices, MaxSim, MaxSimApart, MaxSimSpans
from maxsimd.engine.scoring.similarity import TOKEN_SIMILARITIES, as_named, score_pairs, score_with_matches
from maxsimd.pooling.dispatch import Pooled
from maxsimd.pooling.ragged import Ragged, Spans, decoded, joined_on, to_device, to_host
from maxsimd.scheduler import CachedBatch, DocumentPayload, Explained, ResultSlot, TokenSequence, Window


@dataclass(frozen=True, slots=True, eq=False)
class ScoringJob:
    """Queries and documents to compare: query `embeddings` [tokens, dim], `pairs` [n, 2] of query and
    document index, and the slot of each pair's score. `explained` says by pair index how to explain a
    score. `share` is less than 1 if the embeddings are a part of a query's rows."""

    embeddings: list[torch.Tensor]
    pairs: Indices
    slots: tuple[ResultSlot, ...]
    explained: Mapping[int, Explained]
    share: float = 1.0

    @property
    def queries(self) -> Ragged:
        return Ragged.from_items(self.embeddings)

    def of_documents(self, documents: Indices) -> "ScoringJob":
        """Returns the job for some of its documents, renumbered."""
        position = np.full(max(self.pairs[:, 1].max(initial=-1), documents.max(initial=-1)) + 1, -1)
        position[documents] = np.arange(len(documents))
        at = position[self.pairs[:, 1]]
        wanted = np.flatnonzero(at >= 0)
        pairs = np.column_stack([self.pairs[wanted, 0], at[wanted]])
        indices = wanted.tolist()
        explained = {new: self.explained[old] for new, old in enumerate(indices) if old in self.explained}
        return ScoringJob(
            self.embeddings, pairs, tuple(self.slots[i] for i in indices), explained, self.share
        )


@dataclass(frozen=True, slots=True, eq=False)
class CachedDocument:
    """A document to score whose embedding is cached or was sent."""

    slot: ResultSlot
    embedding: CachedEmbedding
    explained: Explained | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CachedDocuments:
    """A `CachedBatch` by columns: the device thread need not visit each document. `explained` is by index."""

    slots: tuple[ResultSlot, ...]
    embeddings: tuple[CachedEmbedding, ...]
    keys: tuple[bytes | None, ...]
    explained: Mapping[int, Explained]

    @classmethod
    def of(cls, documents: Sequence[CachedDocument]) -> Self:
        return cls(
            tuple(document.slot for document in documents),
            tuple(document.embedding for document in documents),
            tuple(document.embedding.key for document in documents),
            {i: each.explained for i, each in enumerate(documents) if each.explained is not None},
        )

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class SkippedSequence:
    """A sequence that is not run: its embedding has been cached since its request came, or, without an
    `embedding`, an equal document comes before it in the step."""

    sequence: TokenSequence
    embedding: CachedEmbedding | None = None


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request that cannot be completed: it lacks the values of `indexes`, or any. `sequence_id` is the
    sequence that failed, if one did; the rest of it must not run."""

    request_id: int
    reason: str
    indexes: tuple[int, ...] = ()
    sequence_id: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Item i of `items` is for `slots[i]`: a number if `scalar`, else an array."""

    slots: tuple[ResultSlot, ...]
    items: Ragged
    scalar: bool


@dataclass(frozen=True, slots=True, eq=False)
class Releases:
    """Used up by a step: scored consumers by query id, and complete documents read through windows."""

    queries: Mapping[int, int] = field(default_factory=dict)
    documents: frozenset[int] = frozenset()


# A moment in the device's work, which a thread can wait for.
Arrival: TypeAlias = torch.cuda.Event


def record_arrival(device: torch.device) -> Arrival | None:
    """An event that completes when all work launched on a CUDA device so far is done. None for other devices,
    for which `to_host` has waited. Waiting for it sleeps and does not spin."""
    if device.type != "cuda":
        return None
    # Waiting for another kind of event keeps a core busy.
    event = torch.cuda.Event(blocking=True)
    # By its device: the current stream may belong to another GPU.
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(slots=True, eq=False)
class StepOutcome:
    """The result of scoring a stage of a step, before it is delivered.

    `consumers` counts scored documents by query id, `complete` holds the ids of documents read through
    windows. `send_to_host` sets `host`: the outputs' numbers end to end, float32 [n], which are there once
    the device has come to `arrival` (None: at once)."""

    outputs: list[Output] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    new_embeddings: list[PendingEmbeddings] = field(default_factory=list)
    consumers: Counter[int] = field(default_factory=Counter)
    complete: set[int] = field(default_factory=set)
    host: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    arrival: Arrival | None = None

    @property
    def releases(self) -> Releases:
        return Releases(dict(self.consumers), frozenset(self.complete))

    def add(self, scores: torch.Tensor, slots: tuple[ResultSlot, ...]) -> None:
        self.outputs.append(Output(slots, Ragged.one_row_each(scores[:, None]), scalar=True))

    def send_to_host(self, device: torch.device) -> None:
        """Starts one transfer of all outputs from `device`."""
        if self.outputs:
            self.host = to_host(torch.cat([each.items.values.reshape(-1).float() for each in self.outputs]))
        self.arrival = record_arrival(device)

    def results(self) -> list[tuple[ResultSlot, Value]]:
        """Returns the values for all slots, once the numbers are there. They are copied out of pinned memory:
        a view that a caller keeps would hold the whole step's block, which torch never frees."""
        flat = self.host.numpy()
        is_pinned = self.host.is_pinned()
        results: list[tuple[ResultSlot, Value]] = []
        position = 0
        for output in self.outputs:
            count, dim = output.items.values.numel(), output.items.values.shape[-1]
            part = flat[position : position + count]
            position += count
            if output.scalar:
                values: list[Value] = part.tolist()
            else:
                rows = part.reshape(-1, dim)
                parts = (rows[start:stop] for start, stop in pairwise(output.items.offsets.tolist()))
                values = [part.copy() if is_pinned else part for part in parts]
            results += zip(output.slots, values, strict=True)
        return results


@dataclass(slots=True, eq=False)
class _StoredQuery:
    embedding: torch.Tensor
    request_id: int
    consumers_left: int


class QueryStore:
    """Holds each query's embedding [tokens, dim] until its announced number of documents is scored. A query
    may be put twice, so that a step may be retried."""

    def __init__(self) -> None:
        self._queries: dict[int, _StoredQuery] = {}

    def __len__(self) -> int:
        return len(self._queries)

    def put(self, query: TokenSequence, embedding: torch.Tensor) -> None:
        # A clone, so that one query does not hold the whole step's tensor alive.
        stored = _StoredQuery(embedding.clone(), query.request_id, query.num_consumers)
        self._queries[query.sequence_id] = stored

    def get(self, query_id: int) -> torch.Tensor:
        """Raises KeyError if the query is not stored."""
        return self._queries[query_id].embedding

    def release(self, query_id: int, consumers: int = 1) -> None:
        """Counts documents as scored; the query is forgotten after the last."""
        query = self._queries.get(query_id)
        if query is not None:
            query.consumers_left -= consumers
            if query.consumers_left <= 0:
                del self._queries[query_id]

    def drop_request(self, request_id: int) -> None:
        for query_id in [i for i, query in self._queries.items() if query.request_id == request_id]:
            del self._queries[query_id]


class WindowStore:
    """Holds the token embeddings of windows until their document is complete, exactly once: before a step is
    retried, its windows must be forgotten."""

    def __init__(self) -> None:
        # By document id, then by the window's sequence id.
        self._held: dict[int, dict[int, tuple[TokenSequence, torch.Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, sequence: TokenSequence, window: Window, embedding: torch.Tensor) -> torch.Tensor | None:
        """Returns the whole document's embeddings [tokens, dim] with its last window, else None."""
        document = self._held.setdefault(window.document_id, {})
        # A clone, so that one window does not hold the whole step's tensor alive.
        document[sequence.sequence_id] = sequence, embedding.clone()
        if len(document) < window.num_windows:
            return None
        return torch.cat([document[sequence_id][1] for sequence_id in sorted(document)])

    def tokens(self, document_id: int) -> int:
        """Returns how many tokens of a document's windows have arrived."""
        return sum(len(sequence) for sequence, _ in self._held[document_id].values())

    def forget(self, sequence_ids: Collection[int]) -> None:
        """Undoes `put` for these sequences."""
        for document_id, windows in list(self._held.items()):
            for sequence_id in [found for found in windows if found in sequence_ids]:
                del windows[sequence_id]
            if not windows:
                del self._held[document_id]

    def release(self, document_id: int) -> None:
        self._held.pop(document_id, None)

    def drop_request(self, request_id: int) -> None:
        firsts = {document_id: next(iter(windows.values()))[0] for document_id, windows in self._held.items()}
        for document_id in [i for i, first in firsts.items() if first.request_id == request_id]:
            del self._held[document_id]


_NO_QUERY = "the query's embedding is no longer stored"


class DocumentScorer:
    """Owns queries whose documents are still to come, and documents with missing windows.

    Documents are compared on `device` in `dtype`, or as int8 if they are cached so and `maxsim`
    `takes_int8`. Cached ones are compared on the host by `maxsim_apart`, or in the cache's slab by
    `maxsim_spans`; without these they are joined first."""

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
    ) -> StepOutcome:
        """Scores all documents that a step completes, in one batch for each task. Stores the step's queries
        and windows by their ids, which `commit` releases once the scores are delivered. Before a failed step
        is retried, `forget` must be called with its ids."""
        made = StepOutcome()
        new_rows: dict[bytes, tuple[Ragged, int]] = {}
        for task in pooled:
            for i, sequence in enumerate(task.sequences):
                if sequence.num_consumers:
                    self.queries.put(sequence, task.items[i])
            documents, items = self._complete_documents(task, made)
            for part, rows in self._quantize_and_stage_for_cache(documents, items, new_rows, made):
                self._score_ragged(self._find_queries(part, made), rows, made)
        self._score_skipped(skipped, new_rows, made)
        for batch in cached:
            self._score_batch(batch, made)
        return made

    def forget(self, sequence_ids: Collection[int]) -> None:
        """Forgets the windows that a failed attempt has stored. The next attempt overwrites its queries."""
        self.windows.forget(sequence_ids)

    def commit(self, releases: Releases) -> None:
        """Releases what a delivered step has used up."""
        for query_id, consumers in releases.queries.items():
            self.queries.release(query_id, consumers)
        for document_id in releases.documents:
            self.windows.release(document_id)

    def drop_request(self, request_id: int) -> None:
        self.queries.drop_request(request_id)
        self.windows.drop_request(request_id)

    def _complete_documents(self, pooled: Pooled, made: StepOutcome) -> tuple[list[TokenSequence], Ragged]:
        """Returns the documents that are complete with this step, and their embeddings."""
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

    def _quantize_and_stage_for_cache(
        self,
        documents: list[TokenSequence],
        items: Ragged,
        new_rows: dict[bytes, tuple[Ragged, int]],
        made: StepOutcome,
    ) -> list[tuple[list[TokenSequence], Ragged]]:
        """Starts copying new embeddings to the host for the cache and to the slab. Returns the rows to score,
        cacheable ones in the cache's precision, so that a hit and a miss score identically."""
        if not documents:
            return []
        cacheable = [i for i, document in enumerate(documents) if _document(document).cache_key is not None]
        if self._cache is None or not cacheable:
            return [(documents, items)]
        parts = []
        if len(cacheable) < len(documents):
            others = [i for i, document in enumerate(documents) if _document(document).cache_key is None]
            parts.append(([documents[i] for i in others], items.take(others)))
            items = items.take(cacheable)
            documents = [documents[i] for i in cacheable]
        rounded = self._cache.rounded(items)
        pending = PendingEmbeddings([self._facts_of(document) for document in documents], rounded)
        made.new_embeddings.append(pending)
        new_rows |= {key: (rounded, i) for i, key in enumerate(pending.keys)}
        if self._slab is not None:
            self._slab.put(pending.keys, rounded)
        return [*parts, (documents, rounded)]

    def _facts_of(self, sequence: TokenSequence) -> EmbeddingFacts:
        document = _document(sequence)
        tokens = len(sequence)
        if document.window is not None:
            tokens = self.windows.tokens(document.window.document_id)
        return EmbeddingFacts(_cache_key(sequence), tokens, document.truncated)

    def _score_skipped(
        self,
        skipped: Sequence[SkippedSequence],
        new_rows: dict[bytes, tuple[Ragged, int]],
        made: StepOutcome,
    ) -> None:
        duplicates = [one.sequence for one in skipped if one.embedding is None]
        if duplicates:
            found = [new_rows[_cache_key(sequence)] for sequence in duplicates]
            rows = Ragged.join([rounded.item(i) for rounded, i in found])
            self._score_ragged(self._find_queries(duplicates, made), rows, made)
        hits = [(one.sequence, one.embedding) for one in skipped if one.embedding is not None]
        if hits:
            sequences, entries = zip(*hits, strict=True)
            job = self._find_queries(sequences, made)
            self._score_cached(job, entries, [entry.key for entry in entries], made)

    def _score_batch(self, batch: CachedBatch, made: StepOutcome) -> None:
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
        of_query = np.zeros(len(documents), dtype=np.int64)
        pairs = np.column_stack([of_query, np.arange(len(documents))])
        job = ScoringJob([query], pairs, documents.slots, documents.explained, share)
        self._score_cached(job, documents.embeddings, documents.keys, made)

    def _score_cached(
        self,
        job: ScoringJob,
        entries: Sequence[CachedEmbedding],
        keys: Sequence[bytes | None],
        made: StepOutcome,
    ) -> None:
        if self._slab is None:
            self._score_from_host(job, entries, made)
            return
        located = self._slab.locate(keys, entries)
        if not len(located.absent):
            self._score_spans(job, located.spans, made)
            return
        self._score_spans(job.of_documents(located.resident), located.spans, made)
        absent = [entries[i] for i in located.absent.tolist()]
        self._score_from_host(job.of_documents(located.absent), absent, made)

    def _score_spans(self, job: ScoringJob, documents: Spans, made: StepOutcome) -> None:
        """Scores documents in the slab. All that reads them is launched before this returns."""
        if not len(job.pairs):
            return
        if self._maxsim_spans is None:
            self._score_ragged(job, documents.gathered(), made)
            return
        queries = job.queries.decoded(self._dtype)
        scores = as_named(
            self._similarity, self._maxsim_spans(queries, documents, job.pairs), queries, job.pairs
        )
        self._add(scores, job, lambda i: documents.item(i).decoded(self._dtype).values, made)

    def _score_from_host(
        self, job: ScoringJob, entries: Sequence[CachedEmbedding], made: StepOutcome
    ) -> None:
        if self._maxsim_apart is None:
            # Joined on the device; they travel in the cache's precision.
            rows = joined_on(self.device, [entry.rows for entry in entries])
            scales = [entry.scales for entry in entries if entry.scales is not None]
            of_rows = joined_on(self.device, scales) if scales else None
            items = Ragged.from_lengths(rows, [entry.rows.shape[0] for entry in entries], of_rows)
            self._score_ragged(job, items, made)
        elif len(job.pairs):
            queries = job.queries.decoded(self._dtype)
            apart = [(entry.rows, entry.scales) for entry in entries]
            scores = self._maxsim_apart(queries, apart, job.pairs)
            scores = as_named(self._similarity, scores, queries, job.pairs)
            self._add(scores, job, lambda i: decoded(*apart[i], self._dtype), made)

    def _query(self, query_id: int, given: torch.Tensor | None) -> torch.Tensor:
        """Raises KeyError if the query is not stored."""
        if given is None:
            return self.queries.get(query_id)
        rows = to_device(given, self.device)
        # A single vector is compared in float32, like a query that was run here.
        return rows.to(self._dtype) if self._similarity in TOKEN_SIMILARITIES else rows.float()

    def _score_ragged(self, job: ScoringJob, items: Ragged, made: StepOutcome) -> None:
        if not len(job.pairs):
            return
        if items.scales is None or not self._takes_int8:
            items = items.decoded(self._dtype)
        queries = job.queries
        if self._similarity in TOKEN_SIMILARITIES:  # which multiply numbers of one precision
            queries = queries.decoded(self._dtype)
        scores = score_pairs(self._similarity, queries, items, job.pairs, self._maxsim)
        self._add(scores, job, lambda i: items.item(i).decoded(self._dtype).values, made)

    def _add(
        self,
        scores: torch.Tensor,
        job: ScoringJob,
        document: Callable[[int], torch.Tensor],
        made: StepOutcome,
    ) -> None:
        """Adds the scores of all pairs, explained ones with matches. `document` returns the scored rows.
        Scores of parts of a query will be added up: means count by their share of the rows."""
        is_mean = self._similarity == "meanmaxsim"
        if is_mean and job.share != 1:
            scores = scores * job.share
        if not job.explained:
            made.add(scores, job.slots)
            return
        with_matches = []
        for i, how in job.explained.items():
            query, item = job.pairs[i].tolist()
            embedding = job.embeddings[query].to(self._dtype)
            share = job.share if is_mean else None
            with_matches.append(score_with_matches(scores[i], embedding, document(item), how, share))
        slots = tuple(job.slots[i] for i in job.explained)
        made.outputs.append(Output(slots, Ragged.from_items(with_matches), scalar=False))
        others = [i for i in range(len(job.pairs)) if i not in job.explained]
        if others:
            rows = to_device(torch.tensor(others), scores.device)
            made.add(scores[rows], tuple(job.slots[i] for i in others))

    def _find_queries(self, sequences: Sequence[TokenSequence], made: StepOutcome) -> ScoringJob:
        """Finds the query of each document; fails the requests whose queries are no longer stored."""
        position: dict[int, int] = {}
        embeddings: list[torch.Tensor] = []
        pairs: list[tuple[int, int]] = []
        slots: list[ResultSlot] = []
        explained: dict[int, Explained] = {}
        for i, sequence in enumerate(sequences):
            document, slot = _document(sequence), sequence.payload.slot
            assert slot is not None
            query_id = document.query_id
            if query_id not in position:
                try:
                    embeddings.append(self._query(query_id, document.given_query))
                except KeyError:
                    made.failures.append(RequestFailure(slot.request_id, _NO_QUERY))
                    continue
                position[query_id] = len(embeddings) - 1
            if document.explained is not None:
                explained[len(pairs)] = document.explained
            pairs.append((position[query_id], i))
            slots.append(slot)
            made.consumers[query_id] += document.num_windows
        return ScoringJob(embeddings, np.array(pairs, dtype=np.int64).reshape(-1, 2), tuple(slots), explained)


def _document(sequence: TokenSequence) -> DocumentPayload:
    assert sequence.payload.document is not None
    return sequence.payload.document


def _cache_key(sequence: TokenSequence) -> bytes:
    key = _document(sequence).cache_key
    assert key is not None
    return key


# An estimate for a small model (MiniLM-L6): scoring this many cached rows against a usual query, or handling
# this many cached documents, takes as long as running a token.
ROWS_PER_TOKEN, DOCUMENTS_PER_TOKEN = 128, 4

# The multiply-adds of a token in MiniLM-L6. Smaller models take longer than theirs suggest.
_LEAST_MULTIPLY_ADDS = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
# Comparing two rows costs this many multiply-adds beside their product, for maxima and moving numbers: 60 to
# 370 in plain torch, for queries of 256 to 6,000 rows and 16 to 384 dimensions.
_MORE_PER_COMPARISON = 256
# Explaining a score costs this many times the score: plain torch finds the matches in float32.
EXPLAINED = 3


@dataclass(frozen=True, slots=True)
class ScoringPrice:
    """The price of MaxSim in tokens: how many the model could run in the same time.

    `ROWS_PER_TOKEN` rows of a document cost one token for a query of at most `usual_query_rows`, since
    reading them takes most of the time. Longer queries cost in proportion to their rows."""

    usual_query_rows: float

    @classmethod
    def of(cls, model: LoadedModel) -> Self:
        """Estimates from the dimensions of a model's vectors and the multiply-adds of its layers."""
        task = model.tasks.get(model.score_task)
        compared = (1 if task is None else task.dim) + _MORE_PER_COMPARISON
        config = getattr(model.backbone, "config", None)
        return cls(max(_LEAST_MULTIPLY_ADDS, _multiply_adds(config)) / compared / ROWS_PER_TOKEN)

    def rows(self, query_rows: int, document_rows: int, times: int = 1) -> float:
        """Returns how many rows, compared with a usual query, cost the same as `document_rows` compared
        with this query. `times` multiplies the query's rows for explained scores."""
        return document_rows * max(1.0, times * query_rows / self.usual_query_rows)

    def parts(self, query_rows: int, document_rows: int, most: int, times: int = 1) -> int:
        """Returns into how many parts to divide a query, so that a document counts as about `most` rows
        for each. No part is smaller than a usual query: it would cost the same."""
        wanted = ceil(self.rows(query_rows, document_rows, times) / most)
        return max(1, min(wanted, query_rows, int(times * query_rows / self.usual_query_rows)))

    def tokens(self, rows: float, documents: int) -> int:
        """Returns the price of `rows` of some cached documents; at least 1."""
        return max(1, ceil(rows / ROWS_PER_TOKEN + documents / DOCUMENTS_PER_TOKEN))

    def extra_tokens(self, query_rows: int, document_rows: int, times: int = 1) -> int:
        """Returns the price of scoring a document that is run in the same step, beyond the score for a
        usual query, which the price of its tokens includes."""
        return int((self.rows(query_rows, document_rows, times) - document_rows) / ROWS_PER_TOKEN)


def _multiply_adds(config: Any) -> int:
    """Returns those of a token in a backbone's linear layers; 0 if the configuration does not tell."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers, inner = (
        _size(text, name) for name in ("hidden_size", "num_hidden_layers", "intermediate_size")
    )
    return layers * (4 * hidden * hidden + 2 * hidden * (inner or 4 * hidden))


def _size(config: Any, name: str) -> int:
    """Returns a number of a configuration, or the mean over its layers; 0 if it has none."""
    try:
        value = getattr(config, name, None) or 0
        return int(sum(value) / len(value)) if isinstance(value, list | tuple) else int(value)
    except Exception:  # configurations of transformers raise errors of their own
        return 0
