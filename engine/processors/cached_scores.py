"""Score requests of which some scores are cached: only the other documents are run."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.cache.scores import CachedScore, ScoreCache
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.processors.combine import Combine, NoScores, Scores
from maxsimd.engine.processors.explain_pairs import renumbered
from maxsimd.engine.processors.prepared import Explain, PairFacts, Prepared
from maxsimd.engine.processors.readable import only
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.processors.strategy import ScoreStrategy
from maxsimd.engine.requests import ScoreRequest, Value, Values


@dataclass(frozen=True, slots=True, eq=False)
class CachedAndNew:
    """The scores that are `cached` (NaN for those that are not), and at `positions` those that `scores` makes
    of the values that were run."""

    cached: NDArray[np.float32]
    positions: NDArray[np.int64]
    scores: Combine

    def __call__(self, values: list[Value]) -> Scores:
        found = self.cached.copy()
        if len(self.positions):
            found[self.positions] = self.scores(values)
        return found


class CachedScoresStrategy:
    """Prepares what another strategy would, but for the pairs whose scores are in the cache.

    With `together` a document's score depends on the others of its request, so that all of them are cached
    or none is."""

    def __init__(self, strategy: ScoreStrategy, cache: ScoreCache, together: bool) -> None:
        self._strategy = strategy
        self._cache = cache
        self._together = together

    def prepare(self, request: ScoreRequest, ids: RequestIds) -> Prepared:
        if request.cache == "bypass":
            return self._strategy.prepare(request, ids)
        keys = self._keys(request)
        found: list[CachedScore | None] = [None] * len(keys)
        if request.cache == "use":
            there = iter(self._cache.find([key for key in keys if key is not None]))
            found = [None if key is None else next(there) for key in keys]
        if request.explain:
            # Of windows only the best score is cached, and of documents that are run together no tokens.
            found = [
                None if entry is None or entry.windows > 1 or self._together else entry for entry in found
            ]
        if self._together and None in found:
            found = [None] * len(keys)
        cached = np.array([math.nan if entry is None else entry.score for entry in found], dtype=np.float32)
        new = [i for i, entry in enumerate(found) if entry is None]
        prepared = self._prepare(request, new, ids)
        new_keys = [keys[i] for i in new]
        entries = {i: entry for i, entry in enumerate(found) if entry is not None}
        return replace(
            prepared,
            truncated=prepared.truncated + _cut_for(entries, request, {request.query_of(i) for i in new}),
            combine=CachedAndNew(cached, np.array(new, dtype=np.int64), prepared.combine),
            cached_documents=len(entries),
            cached_tokens=sum(entry.tokens for entry in entries.values()),
            cache_scores=self._put_into_cache(new, new_keys, prepared.facts),
            explain=_explained(entries, new, prepared.explain) if request.explain else None,
        )

    def shortest_sequences(self) -> dict[str, int]:
        return self._strategy.shortest_sequences()

    def _prepare(self, request: ScoreRequest, positions: list[int], ids: RequestIds) -> Prepared:
        """Some documents of a request."""
        if not positions:
            return Prepared([], 0, 0, NoScores(0))
        if len(positions) == len(request.documents):
            return self._strategy.prepare(request, ids)
        try:
            return self._strategy.prepare(only(request, positions), ids)
        except InvalidRequestError:
            # Errors name a document by its index in the whole request.
            self._strategy.prepare(request, ids)
            raise

    def _keys(self, request: ScoreRequest) -> list[bytes | None]:
        """The key of each document's score; None for pairs with pictures, whose scores are not cached."""
        how = f"{request.truncation!r} {request.instruction!r} {request.cache_owner!r}"
        if self._together and len(request.queries) == 1:
            all_documents = hashlib.blake2b(digest_size=32)
            for given in request.document_texts:
                text = given.encode("utf-8", "surrogatepass")
                all_documents.update(len(text).to_bytes(8, "big") + text)
            how = f"{how} {all_documents.hexdigest()}"
        keys: list[bytes | None] = []
        for i, document in enumerate(request.documents):
            query = request.queries[request.query_of(i)]
            if isinstance(query, str) and isinstance(document, str):
                keys.append(self._cache.key(query, document, how))
            else:
                keys.append(None)
        return keys

    def _put_into_cache(
        self, positions: list[int], keys: list[bytes | None], facts: PairFacts | None
    ) -> Callable[[Scores], None]:
        """What caches the scores of the documents that were run, once they are there."""

        def cache_scores(scores: Scores) -> None:
            if facts is None:
                return
            of_each = zip(facts.tokens, facts.truncated, facts.query_truncated, facts.windows, strict=True)
            there = zip(keys, scores[positions].tolist(), of_each, strict=True)
            self._cache.put(
                (key, CachedScore(score, *about))
                for key, score, about in there
                if key is not None and math.isfinite(score)
            )

        return cache_scores


def _explained(entries: dict[int, CachedScore], new: list[int], explain: Explain | None) -> Explain:
    """Explains documents whose scores are cached, and those that `explain` knows: the `new` ones."""
    of_new = None if explain is None else renumbered(explain, new)

    def explained(values: Values, index: int) -> Explanation | None:
        entry = entries.get(index)
        if entry is not None:
            return Explanation(entry.tokens, bool(entry.truncated), cached=True)
        return None if of_new is None else of_new(values, index)

    return explained


def _cut_for(entries: dict[int, CachedScore], request: ScoreRequest, run: set[int]) -> int:
    """How many inputs were cut for documents that are cached: of their queries, only those that are not `run`
    for others."""
    queries = {request.query_of(i) for i, entry in entries.items() if entry.query_truncated}
    return sum(entry.truncated for entry in entries.values()) + len(queries - run)
