"""The documents of a two-stage request: each one once, as its embedding if it is kept, else as sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.preprocess.long_inputs import LongInputs
from maxsimd.engine.preprocess.texts import Parts, TextBuilder
from maxsimd.engine.requests import CacheMode, ScoreRequest


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One document to be scored against one query: `kept`, or `windows` to be run and kept under `cache_key`.

    `query` is the place of its query among the request's."""

    query: int
    kept: CachedEmbedding | None
    windows: list[Parts]
    cache_key: bytes | None
    truncated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The different documents of a request; `place_of[i]` is where its document i stands among them."""

    different: list[Document]
    place_of: list[int]


class DocumentReader:
    """Finds kept embeddings and builds sequences for the rest. `cache` is None where none is in use."""

    def __init__(self, builder: TextBuilder, long_inputs: LongInputs, cache: EmbeddingCache | None) -> None:
        self._builder = builder
        self._long = long_inputs
        self._cache = cache

    def read(self, request: ScoreRequest) -> Documents:
        texts: list[tuple[int, str]] = []
        places: dict[tuple[int, str], int] = {}
        place_of = []
        for i, text in enumerate(request.documents):
            pair = (request.query_of(i), text)
            if pair not in places:
                places[pair] = len(texts)
                texts.append(pair)
            place_of.append(places[pair])
        keys = self._keys([text for _, text in texts])
        kept = self._find(keys, request.cache, len(texts))
        missing = [i for i, entry in enumerate(kept) if entry is None]
        encoded = dict(zip(missing, self._builder.encode(tuple(texts[i][1] for i in missing)), strict=True))
        documents = []
        for i, (query, _) in enumerate(texts):
            entry = kept[i]
            if entry is not None:
                self._long.truncated += entry.truncated
                documents.append(Document(query, entry, [], None, entry.truncated))
                continue
            before = self._long.truncated
            windows = self._builder.windows(self._long.document(encoded[i]), i)
            key = keys[i] if keys else None
            documents.append(Document(query, None, windows, key, self._long.truncated > before))
        return Documents(documents, place_of)

    def _keys(self, texts: Sequence[str]) -> list[bytes]:
        if self._cache is None:
            return []
        how = self._long.signature
        return [self._cache.key(text, how) for text in texts]

    def _find(self, keys: Sequence[bytes], mode: CacheMode, count: int) -> list[CachedEmbedding | None]:
        cache = self._cache
        if cache is None:
            return [None] * count
        if mode == "refresh":
            for key in keys:
                cache.drop(key)
            return [None] * count
        found = [cache.get(key) for key in keys]
        hits = sum(entry is not None for entry in found)
        cache.count(hits, len(found) - hits)
        return found
