"""Scoring documents against queries on the device: those just pooled, those read through windows once they
are complete, and those whose embeddings were kept."""

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Protocol

import torch

from maxsimd.engine.cache import About, Arriving, CachedEmbedding, EmbeddingCache
from maxsimd.engine.scoring.documents import Failure, KeptDocument, KnownSequence
from maxsimd.engine.scoring.maxsim import MaxSim
from maxsimd.engine.scoring.query_store import QueryRegistry
from maxsimd.engine.scoring.similarity import TOKEN_SIMILARITIES, score_pairs
from maxsimd.engine.scoring.window_store import WindowRegistry
from maxsimd.pooling.dispatch import Pooled
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.transfer import to_device
from maxsimd.scheduler import Sequence

# Kept embeddings are scored in parts of as many rows.
ROWS_TOGETHER = 16_384


class Place(Protocol):
    """What a value is for: `index` among the values of `request`."""

    @property
    def request(self) -> int: ...
    @property
    def index(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Scores [n] on the device, each for a place."""

    places: list[Place]
    scores: torch.Tensor


class DocumentScorer:
    """Owns the queries whose documents are still to come, unfinished documents, and kept documents whose
    queries are still to come. Documents are compared on `device` in the precision `dtype`, or as int8 where
    they are kept so and `maxsim` takes that. Used by the scoring actor alone."""

    def __init__(
        self,
        similarity: str,
        maxsim: MaxSim,
        takes_int8: bool,
        device: torch.device,
        dtype: torch.dtype,
        cache: EmbeddingCache | None,
    ) -> None:
        self._similarity = similarity
        self._maxsim = maxsim
        self._takes_int8 = takes_int8 and similarity in TOKEN_SIMILARITIES
        self.device = device
        self._dtype = dtype
        self._cache = cache
        self._queries = QueryRegistry()
        self._windows = WindowRegistry()
        self._attached: dict[int, list[KeptDocument]] = {}
        # What the last call of `score` is done with, should its step not be tried again.
        self._used: list[tuple[int, int]] = []
        self._complete_documents: list[int] = []
        self._scored_attached: list[int] = []
        self._arriving: list[Arriving] = []

    def attach(self, documents: list[KeptDocument]) -> None:
        """Takes kept documents, to be scored when their queries are there."""
        for document in documents:
            self._attached.setdefault(document.query, []).append(document)

    def drop_request(self, request: int) -> None:
        """Lets go of all that belongs to a request that has ended."""
        self._queries.drop_request(request)
        self._windows.drop_request(request)
        ended = [query for query, kept in self._attached.items() if kept[0].request == request]
        for query in ended:
            del self._attached[query]

    def score(
        self, pooled: list[Pooled], known: list[KnownSequence], failures: list[Failure]
    ) -> list[Scored]:
        """Scores of all documents that a step completes: one batch a task, whatever requests they are of.

        Calling it twice for the same step has the effect of calling it once; `settle` comes after."""
        self._used, self._complete_documents, self._scored_attached, self._arriving = [], [], [], []
        scored: list[Scored] = []
        fresh: dict[bytes, torch.Tensor] = {}
        for task in pooled:
            for sequence, item in task:
                if sequence.uses:
                    self._queries.put(sequence, item)
                    scored += self._score_attached(sequence.key, failures)
            documents, items = self._complete(task)
            if documents:
                for part, kept in self._keep(documents, items, fresh):
                    scored += self._against_queries(part, kept, failures)
                self._complete_documents += [
                    document.document for document in documents if document.document is not None
                ]
        equal = [one.sequence for one in known if one.embedding is None]
        if equal:
            rows = Ragged.from_items([fresh[_key(sequence)] for sequence in equal])
            scored += self._against_queries(equal, rows, failures)
        entries = [(one.sequence, one.embedding) for one in known if one.embedding is not None]
        if entries:
            sequences, kept_rows = [sequence for sequence, _ in entries], [entry for _, entry in entries]
            scored += self._against_queries(sequences, self._side_by_side(kept_rows), failures)
        return scored

    def settle(self) -> list[Arriving]:
        """Lets go of what the last call of `score` is done with, because its results are on their way.
        Returns its new embeddings, which are to be kept when they have arrived."""
        for query, uses in self._used:
            self._queries.release(query, uses)
        for document in self._complete_documents:
            self._windows.release(document)
        for query in self._scored_attached:
            self._attached.pop(query, None)
        return self._arriving

    def keep(self, arrived: list[Arriving]) -> None:
        """Puts new embeddings that have arrived on the host into the cache."""
        for new in arrived:
            assert self._cache is not None
            self._cache.put(new.entries())

    def _score_attached(self, query: int, failures: list[Failure]) -> list[Scored]:
        documents = self._attached.get(query)
        if documents is None:
            return []
        self._scored_attached.append(query)
        scored = []
        for part in _in_parts(documents):
            entries = [document.embedding for document in part]
            scored += self._against_queries(part, self._side_by_side(entries), failures)
        return scored

    def _side_by_side(self, entries: list[CachedEmbedding]) -> Ragged:
        """Kept embeddings end to end on the device. They travel as they are kept."""
        rows = Ragged.from_items([entry.rows for entry in entries])
        scales = [entry.scales for entry in entries if entry.scales is not None]
        return Ragged(
            to_device(rows.values, self.device),
            rows.offsets,
            to_device(torch.cat(scales), self.device) if scales else None,
        )

    def _complete(self, pooled: Pooled) -> tuple[list[Sequence], Ragged]:
        """The documents that are complete with this step, and their embeddings; one that is read through
        windows is when its last one is there."""
        if all(sequence.query is not None and sequence.document is None for sequence in pooled.sequences):
            return list(pooled.sequences), pooled.items
        documents, items = [], []
        for sequence, item in pooled:
            if sequence.query is None:
                continue
            whole = item if sequence.document is None else self._windows.put(sequence, item)
            if whole is not None:
                documents.append(sequence)
                items.append(whole)
        return documents, Ragged.from_items(items) if items else pooled.items

    def _keep(
        self, documents: list[Sequence], items: Ragged, fresh: dict[bytes, torch.Tensor]
    ) -> list[tuple[list[Sequence], Ragged]]:
        """Lets the embeddings of documents that are to be kept begin their way, and gives back what documents
        score with: those, as they are kept, so that a document scores alike whether it was there or not; and
        the others as they are."""
        kept = [i for i, document in enumerate(documents) if document.cache_key is not None]
        if self._cache is None or not kept:
            return [(documents, items)]
        parts = []
        if len(kept) < len(documents):
            others = [i for i, document in enumerate(documents) if document.cache_key is None]
            parts.append(([documents[i] for i in others], Ragged.from_items([items[i] for i in others])))
            items = Ragged.from_items([items[i] for i in kept])
            documents = [documents[i] for i in kept]
        rounded = self._cache.rounded(items)
        self._arriving.append(Arriving([self._about(document) for document in documents], rounded))
        decoded = rounded.decoded(self._dtype)
        fresh.update((_key(document), rows) for document, rows in zip(documents, decoded, strict=True))
        return [*parts, (documents, rounded if self._takes_int8 else decoded)]

    def _about(self, document: Sequence) -> About:
        tokens = len(document) if document.document is None else self._windows.tokens(document.document)
        return About(_key(document), tokens, document.truncated)

    def _against_queries(
        self, documents: ListOf[Sequence | KeptDocument], items: Ragged, failures: list[Failure]
    ) -> list[Scored]:
        places: dict[int, int] = {}
        embeddings: list[torch.Tensor] = []
        pairs: list[tuple[int, int]] = []
        scored: list[Place] = []
        for i, document in enumerate(documents):
            query = document.query
            assert query is not None
            if query not in places:
                try:
                    embeddings.append(self._queries.get(query))
                except KeyError:
                    failures.append(Failure(document.request, "the query's embedding is gone"))
                    continue
                places[query] = len(embeddings) - 1
            pairs.append((places[query], i))
            scored.append(document)
        if not pairs:
            return []
        if items.scales is None or not self._takes_int8:
            items = items.decoded(self._dtype)
        scores = score_pairs(self._similarity, Ragged.from_items(embeddings), items, pairs, self._maxsim)
        for document in documents:
            if document.query in places:
                uses = document.windows if isinstance(document, Sequence) else 1
                self._used.append((document.query, uses))
        return [Scored(scored, scores)]


def _in_parts(documents: list[KeptDocument]) -> Iterator[list[KeptDocument]]:
    """Documents with at most so many rows together that putting them side by side takes no new memory."""
    part: list[KeptDocument] = []
    rows = 0
    for document in documents:
        length = len(document.embedding.rows)
        if part and rows + length > ROWS_TOGETHER:
            yield part
            part, rows = [], 0
        part.append(document)
        rows += length
    yield part


def _key(sequence: Sequence) -> bytes:
    assert sequence.cache_key is not None
    return sequence.cache_key
