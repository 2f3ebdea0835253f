"""Under which keys a request finds and caches the embeddings of documents."""

from collections.abc import Sequence
from dataclasses import dataclass

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.processors.text.long_inputs import LongInputs
from maxsimd.engine.processors.text.texts import BuiltText
from maxsimd.engine.workers import yield_to_smaller


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """The keys of one document. It is cached as `plain` if any request would read it alike: it fits, or is
    read to the checkpoint's own length. Else it is cached `as_requested`: for requests that say the same of
    documents that do not fit."""

    plain: bytes
    as_requested: bytes


class CacheLookup:
    """Looks up the documents of one request. With `refresh` nothing is found, and what is cached is dropped.

    `own_length` is how much of a document the checkpoint reads, None for all of it. Entries of one `owner`
    are invisible to others."""

    def __init__(
        self,
        cache: EmbeddingCache,
        refresh: bool,
        long_inputs: LongInputs,
        own_length: int | None,
        owner: str,
    ) -> None:
        self._cache = cache
        self._refresh = refresh
        self._long_inputs = long_inputs
        self._own_length = own_length
        self._owned = f" for {owner!r}" if owner else ""

    def find(self, texts: Sequence[str]) -> list[CachedEmbedding | CacheKeys]:
        """For each text its embedding, or the keys to cache it under. Counts hits and misses."""
        find = self._drop if self._refresh else self._find
        found: list[CachedEmbedding | CacheKeys] = []
        for text in texts:
            yield_to_smaller()
            found.append(find(text))
        if not self._refresh:
            hits = sum(isinstance(entry, CachedEmbedding) for entry in found)
            self._cache.count(hits, len(found) - hits)
        return found

    def page_key(self, digest: bytes) -> bytes:
        """The key of a picture, by the digest of its pixels."""
        return self._cache.key(digest.hex(), "a picture" + self._owned)

    def find_page(self, key: bytes) -> CachedEmbedding | None:
        """The embedding of a picture, if there is one. Counts a hit or a miss."""
        if self._refresh:
            self._cache.drop(key)
            return None
        entry = self._cache.get(key)
        self._cache.count(int(entry is not None), int(entry is None))
        return entry

    def key_for(self, keys: CacheKeys, windows: Sequence[BuiltText]) -> bytes:
        """The key for a document that is read through `windows`, or through one sequence."""
        whole = len(windows) == 1 and not windows[0].truncated
        return keys.plain if whole and self._is_plain(len(windows[0].tokens)) else keys.as_requested

    def _find(self, text: str) -> CachedEmbedding | CacheKeys:
        plain_key = self._plain_key(text)
        if self._long_inputs.max_document_tokens is None:
            plain = self._cache.get(plain_key)
            if plain is not None and plain.tokens <= self._long_inputs.limit and self._is_plain(plain.tokens):
                return plain
        keys = CacheKeys(plain_key, self._key_as_requested(text))
        entry = self._cache.get(keys.as_requested)
        return keys if entry is None else entry

    def _drop(self, text: str) -> CacheKeys:
        keys = CacheKeys(self._plain_key(text), self._key_as_requested(text))
        self._cache.drop(keys.plain)
        self._cache.drop(keys.as_requested)
        return keys

    # The words and signatures that follow are part of the keys of caches on disk.

    def _plain_key(self, text: str) -> bytes:
        return self._cache.key(text, "as it is" + self._owned)

    def _key_as_requested(self, text: str) -> bytes:
        return self._cache.key(text, self._long_inputs.signature + self._owned)

    def _is_plain(self, tokens: int) -> bool:
        """Whether any request would read a document as this one does that comes to this number of `tokens`.
        One of the checkpoint's own length may have been cut to it, at the usual side and not into windows."""
        if self._long_inputs.max_document_tokens is not None:
            return False
        return self._own_length is None or tokens < self._own_length or self._long_inputs.cuts_as_usual
