"""Cached scores of a request, so that only its other documents are run."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from maxsimd.engine.cache.store import CachedScore, PairKeys, ScoreCache
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.processors.processor import ScorePlan, Scores
from maxsimd.engine.requests import ScoreRequest
from maxsimd.engine.workers import yield_to_smaller


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The cost of running a document: tokens, truncated inputs, whether the query was truncated, and
    windows. If documents are run together, the first has the numbers of all."""

    tokens: int
    truncated: int
    query_truncated: bool
    windows: int


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
        return sum(entry.tokens for entry in self.cached.values())

    @property
    def truncated_documents(self) -> int:
        """Counts documents truncated for cached scores; in lists, the queries too."""
        return sum(entry.truncated for entry in self.cached.values())

    def truncated_queries(self, request: ScoreRequest) -> int:
        """Counts queries truncated for cached scores, without those that are run again for new documents."""
        run_again = {request.query_of(i) for i in self.new}
        queries = {request.query_of(i) for i, entry in self.cached.items() if entry.query_truncated}
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
            (key, CachedScore(score, one.tokens, one.truncated, one.query_truncated, one.windows))
            for key, score, one in of_new
            if key is not None and math.isfinite(score)
        )

    def explanation(self, document: int) -> Explanation | None:
        """Explains a document whose score is cached; None for another."""
        entry = self.cached.get(document)
        return None if entry is None else Explanation(entry.tokens, bool(entry.truncated), cached=True)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CachedScorePlan(ScorePlan):
    """A plan with cached scores. `facts` are those of the `found.new` documents."""

    found: FoundScores
    facts: list[RunFacts]

    def cache_scores(self, raw: Scores) -> None:
        self.found.put(raw, self.facts)


class ScoreLookup:
    """Finds the cached scores of requests to one model; none without `cache`.

    With `together` a document's score depends on the others: all documents of a request are found, or
    none."""

    def __init__(self, cache: ScoreCache | None, together: bool) -> None:
        self._cache = cache
        self._together = together

    def find(self, request: ScoreRequest) -> FoundScores:
        if self._cache is None or request.cache == "bypass":
            return FoundScores.none(request)
        keys = self._keys(request)
        found: list[CachedScore | None] = [None] * len(keys)
        if request.cache == "use":
            entries = iter(self._cache.find([key for key in keys if key is not None]))
            found = [None if key is None else next(entries) for key in keys]
        if request.explain:
            # The cache has only the best score of several windows, and no tokens of a joint run.
            found = [
                None if entry is None or entry.windows > 1 or self._together else entry for entry in found
            ]
        if self._together and None in found:
            found = [None] * len(keys)
        new = [i for i, entry in enumerate(found) if entry is None]
        cached = {i: entry for i, entry in enumerate(found) if entry is not None}
        return FoundScores(len(keys), new, cached, [keys[i] for i in new], self._cache)

    def _keys(self, request: ScoreRequest) -> list[bytes | None]:
        """Returns the key of each document's score; None for pairs with pictures, which are not cached."""
        how = f"{request.truncation!r} {request.instruction!r} {request.cache_owner!r}"
        is_one_list = self._together and len(request.queries) == 1
        if is_one_list:
            all_documents = hashlib.blake2b(digest_size=32)
            for given in request.document_texts:
                text = given.encode("utf-8", "surrogatepass")
                all_documents.update(len(text).to_bytes(8, "big") + text)
            how = f"{how} {all_documents.hexdigest()}"
        keys: list[bytes | None] = []
        of_query: dict[int, PairKeys] = {}
        for i, document in enumerate(request.documents):
            number = request.query_of(i)
            query = request.queries[number]
            if isinstance(query, str) and isinstance(document, str):
                yield_to_smaller()
                if number not in of_query:
                    of_query = {number: PairKeys(query, how)}
                # Equal documents of a list have different scores, by their places.
                keys.append(of_query[number].key(str(i) if is_one_list else document))
            else:
                keys.append(None)
        return keys
