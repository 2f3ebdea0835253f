"""The documents of a two-stage request: each one once, as its embedding if it is cached, else as windows."""

from collections.abc import Sequence
from dataclasses import dataclass

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.preprocess.long_inputs import LongInputs
from maxsimd.engine.preprocess.texts import BuiltText, TextBuilder
from maxsimd.engine.requests import CacheMode, ScoreRequest


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One document to be scored against one query: `cached`, or `windows` to be run and then cached under
    `cache_key`.

    `query` is the index of its query in the request."""

    query: int
    cached: CachedEmbedding | None
    windows: list[BuiltText]
    cache_key: bytes | None
    truncated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The different documents of a request; document i of the request is `different[position_of[i]]`."""

    different: list[Document]
    position_of: list[int]

    @property
    def truncated(self) -> int:
        """How many of the request's documents were cut."""
        return sum(self.different[position].truncated for position in self.position_of)


class DocumentReader:
    """Finds cached embeddings and builds windows for the rest. `cache` is None where none is in use."""

    def __init__(self, builder: TextBuilder, long_inputs: LongInputs, cache: EmbeddingCache | None) -> None:
        self._builder = builder
        self._long = long_inputs
        self._cache = cache

    def read(self, request: ScoreRequest) -> Documents:
        """Raises InvalidRequestError for a document that is too long, by its index in the request."""
        positions: dict[tuple[int, str], int] = {}
        firsts: list[int] = []
        position_of = []
        for i, text in enumerate(request.documents):
            pair = (request.query_of(i), text)
            if pair not in positions:
                positions[pair] = len(firsts)
                firsts.append(i)
            position_of.append(positions[pair])
        texts = [request.documents[i] for i in firsts]
        keys = [self._keys_of(text) for text in texts]
        cached = self._find(keys, request.cache)
        missing = [i for i, entry in enumerate(cached) if entry is None]
        encoded = dict(zip(missing, self._builder.encode(tuple(texts[i] for i in missing)), strict=True))
        documents = []
        for i, first in enumerate(firsts):
            query, entry = request.query_of(first), cached[i]
            if entry is not None:
                documents.append(Document(query, entry, [], None, entry.truncated))
                continue
            windows = self._builder.windows(encoded[i], first)
            truncated = any(parts.truncated for parts in windows)
            as_it_is = not truncated and len(windows) == 1 and self._is_plain(len(windows[0].tokens))
            documents.append(Document(query, None, windows, _chosen(keys[i], as_it_is), truncated))
        return Documents(documents, position_of)

    def _keys_of(self, text: str) -> "_Keys | None":
        cache = self._cache
        if cache is None:
            return None
        return _Keys(cache.key(text, "as it is"), cache.key(text, self._long.signature))

    def _find(self, keys: Sequence["_Keys | None"], mode: CacheMode) -> list[CachedEmbedding | None]:
        cache = self._cache
        if cache is None:
            return [None] * len(keys)
        found = [self._look_up(key, mode) if key is not None else None for key in keys]
        if mode == "use":
            hits = sum(entry is not None for entry in found)
            cache.count(hits, len(found) - hits)
        return found

    def _look_up(self, keys: "_Keys", mode: CacheMode) -> CachedEmbedding | None:
        assert self._cache is not None
        if mode == "refresh":
            self._cache.drop(keys.as_it_is)
            self._cache.drop(keys.as_asked)
            return None
        plain = None if self._long.limits_documents else self._cache.get(keys.as_it_is)
        if plain is not None and plain.tokens <= self._long.limit and self._is_plain(plain.tokens):
            return plain
        return self._cache.get(keys.as_asked)

    def _is_plain(self, tokens: int) -> bool:
        """Whether this request reads a document that came to so many tokens as any other would. One of the
        checkpoint's own length may have been cut to it, at its end and not into windows."""
        if self._long.limits_documents:
            return False
        own = self._builder.own_length
        cut_as_usual = self._long.side == "right" and not self._long.uses_windows
        return own is None or tokens < own or cut_as_usual


@dataclass(frozen=True, slots=True)
class _Keys:
    """A document that fits, or that is read to the checkpoint's own length, is cached `as_it_is`, whatever
    the request says of those that do not fit; others are cached `as_asked`."""

    as_it_is: bytes
    as_asked: bytes


def _chosen(keys: _Keys | None, as_it_is: bool) -> bytes | None:
    if keys is None:
        return None
    return keys.as_it_is if as_it_is else keys.as_asked
