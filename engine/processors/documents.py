"""Documents that are encoded without their query: cached, sent as embeddings, or to run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.cache.documents import TenantTexts
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.media import Content
from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops.cpu.maxsim import first_not_finite
from maxsimd.engine.processors.pages import PageBuilder
from maxsimd.engine.processors.processor import RequestIds, texts_of
from maxsimd.engine.processors.text.builder import BuiltText, InputName, TextBuilder
from maxsimd.engine.requests import DocumentDigest, Item, ScoreRequest, digest_of
from maxsimd.engine.workers import called_on_each, yield_to_smaller
from maxsimd.pooling.query_rows import QueryRows
from maxsimd.pooling.vectors import Vectors
from maxsimd.scheduler import Tokens

# Documents checked before smaller work gets its turn.
_AT_ONCE = 64
# Part of the keys of caches on disk, as "a picture" below.
_AS_IT_IS = "as it is"
# Products of two rows up to this are finite in every precision.
_USUAL = torch.finfo(torch.float16).max
# The largest number that an int8 embedding's scale multiplies.
_INT8_MAX = 127


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A document for query `query`: to run through its `windows` and cache under `cache_key`, if any, or with
    an `embedding` that is cached or was sent. To be explained, the latter has its windows too."""

    query: int
    windows: list[BuiltText]
    embedding: CachedEmbedding | None = None
    cache_key: bytes | None = None

    @property
    def tokens_of_page(self) -> Tokens | None:
        """The tokens of a document with pictures."""
        return self.windows[0].tokens if self.windows and self.windows[0].tokens.images else None

    @property
    def truncated(self) -> bool:
        if self.embedding is not None:
            return self.embedding.truncated
        return any(window.truncated for window in self.windows)

    @property
    def num_consumers(self) -> int:
        """Number of times that it uses its query's embedding: once per window to run."""
        return len(self.windows) if self.embedding is None else 1

    @property
    def tokens(self) -> int:
        """Tokens that are run, or were when it was cached."""
        if self.embedding is not None:
            return self.embedding.tokens
        return sum([len(window.tokens) for window in self.windows])

    @property
    def is_cached(self) -> bool:
        """Whether tokens were run for its embedding."""
        return self.embedding is not None and self.embedding.tokens > 0

    @property
    def num_rows(self) -> int:
        return sum(self.window_rows) if self.embedding is None else len(self.embedding.rows)

    @property
    def window_rows(self) -> tuple[int, ...]:
        """The vectors of each window."""
        if self.embedding is not None and not self.windows:
            return (len(self.embedding.rows),)
        return tuple([window.num_rows for window in self.windows])


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The different documents of a request; document i of the request is `different[position_of[i]]`.
    `firsts` has the first index in the request of each."""

    different: list[Document]
    position_of: list[int]
    firsts: list[int]

    @property
    def truncated(self) -> int:
        """The number of the request's documents that are truncated."""
        truncated = [document.truncated for document in self.different]
        return sum([truncated[position] for position in self.position_of])


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """The keys of one document. `plain`: any request reads it alike, because it fits or is read to the
    checkpoint's own length. `as_requested`: requests with the same limits read it alike."""

    plain: bytes
    as_requested: bytes


class CacheLookup:
    """Looks up one request's documents, which `builder` reads. With `refresh`, cached entries are dropped
    instead. Entries of one `owner` are invisible to others."""

    def __init__(self, cache: EmbeddingCache, refresh: bool, builder: TextBuilder, owner: str) -> None:
        self._cache = cache
        self._refresh = refresh
        self._long_inputs = builder.long_inputs
        # How much of a document the checkpoint reads, None for all.
        self._own_length = builder.own_length
        self._owned = f" for {owner!r}" if owner else ""

    def find(
        self, documents: Sequence[str | DocumentDigest], counts: bool = True
    ) -> list[CachedEmbedding | CacheKeys]:
        """Returns the embedding of each text or digest, or the keys to cache it under. Counts hits and
        misses, unless told not to."""
        found: list[CachedEmbedding | CacheKeys] = []
        for document in documents:
            yield_to_smaller()
            found.append(self._find(digest_of(document) if isinstance(document, str) else document.value))
        if counts and not self._refresh:
            hits = sum([isinstance(entry, CachedEmbedding) for entry in found])
            self._cache.count(hits, len(found) - hits)
        return found

    def find_page(self, digest: bytes) -> tuple[bytes, CachedEmbedding | None]:
        """Returns the key of a picture with this digest, and its cached embedding. Counts a hit or a miss."""
        key = self._key(digest, "a picture")
        if self._refresh:
            self._cache.drop(key)
            return key, None
        entry = self._cache.get(key)
        self._cache.count(int(entry is not None), int(entry is None))
        return key, entry

    def key_for(self, keys: CacheKeys, windows: Sequence[BuiltText]) -> bytes:
        """Returns the key for a document that is read through `windows`."""
        whole = len(windows) == 1 and not windows[0].truncated
        return keys.plain if whole and self._is_plain(len(windows[0].tokens)) else keys.as_requested

    def _find(self, digest: bytes) -> CachedEmbedding | CacheKeys:
        plain_key = self._key(digest, _AS_IT_IS)
        if self._long_inputs.max_document_tokens is None and not self._refresh:
            plain = self._cache.get(plain_key)
            if plain is not None and plain.tokens <= self._long_inputs.limit and self._is_plain(plain.tokens):
                return plain
        keys = CacheKeys(plain_key, self._key(digest, self._long_inputs.signature))
        if self._refresh:
            self._cache.drop(keys.plain)
            self._cache.drop(keys.as_requested)
            return keys
        return self._cache.get(keys.as_requested) or keys

    def _key(self, digest: bytes, how: str) -> bytes:
        return self._cache.key(digest, how + self._owned)

    def _is_plain(self, tokens: int) -> bool:
        """Whether any request reads a document alike. One of the checkpoint's own length may be truncated."""
        if self._long_inputs.max_document_tokens is not None:
            return False
        return self._own_length is None or tokens < self._own_length or self._long_inputs.truncates_as_usual


# A document before its text is tokenized: its embedding, its keys, or its page; None if no cache is in use.
_Found: TypeAlias = CachedEmbedding | CacheKeys | Document | None


class DocumentReader:
    """Reads the documents of one request: checks sent embeddings, finds cached ones, and builds the others.
    `lookup` is None if no cache is in use, `pages` if the model reads only text, and `texts` if no texts are
    kept by their digests."""

    def __init__(
        self,
        builder: TextBuilder,
        lookup: CacheLookup | None,
        given: "GivenVectors",
        pages: PageBuilder | None,
        texts: TenantTexts | None = None,
    ) -> None:
        self.builder = builder
        self._lookup = lookup
        self._given = given
        self._pages = pages
        self._texts = texts

    def read(self, request: ScoreRequest, ids: RequestIds) -> Documents:
        """Reads each different document once. Raises InvalidRequestError for a document that is too long,
        RequestTooLargeError as soon as windows have too many tokens, and UnknownDocumentsError for
        digests."""
        positions: dict[tuple[int, Item], int] = {}
        firsts: list[int] = []
        position_of = []
        for i, text in enumerate(request.documents):
            pair = (request.query_of(i), text)
            if pair not in positions:
                positions[pair] = len(firsts)
                firsts.append(i)
            position_of.append(positions[pair])
        documents = {i: request.documents[i] for i in firsts}
        found = self._find(documents, ids, bool(request.explain))
        if request.has_digests:
            named = {i: each for i, each in documents.items() if isinstance(each, DocumentDigest)}
            unknown = {i: each for i, each in named.items() if not isinstance(found[i], CachedEmbedding)}
            documents |= zip(unknown, texts_of([*unknown.values()], self._texts), strict=True)
        # Documents to explain need their tokens even if nothing is run.
        missing = {
            i: text
            for i, text in documents.items()
            if isinstance(text, str) and (request.explain or not isinstance(found[i], CachedEmbedding))
        }
        encoded = dict(zip(missing, self.builder.encode([*missing.values()], missing), strict=True))
        different: list[Document] = []
        num_tokens = 0
        for first, entry in found.items():
            query = request.query_of(first)
            windows = self.builder.windows(encoded.pop(first), first) if first in encoded else []
            if isinstance(entry, Document):
                document = replace(entry, query=query)
            elif isinstance(entry, CachedEmbedding):
                document = Document(query, windows, entry)
            else:
                key = None
                if self._lookup is not None and entry is not None:
                    key = self._lookup.key_for(entry, windows)
                document = Document(query, windows, cache_key=key)
            if document.embedding is None:
                num_tokens += document.tokens
                if len(document.windows) > 1 or document.tokens_of_page is not None:
                    # Windows multiply a document's tokens, and a few bytes may be many pages.
                    ids.check_tokens(num_tokens)
            different.append(document)
        return Documents(different, position_of, firsts)

    def _find(self, documents: Mapping[int, Item], ids: RequestIds, explain: bool) -> dict[int, _Found]:
        """Looks up each document by its index; returns what is found in the same order."""
        texts = {
            i: document for i, document in documents.items() if isinstance(document, str | DocumentDigest)
        }
        cached = [None] * len(texts) if self._lookup is None else self._lookup.find([*texts.values()])
        found: dict[int, _Found] = dict(zip(texts, cached, strict=True))
        if len(texts) == len(documents):
            return found
        given = {i: document for i, document in documents.items() if isinstance(document, Vectors)}
        found.update(self._given.documents(given))
        contents = [(i, document) for i, document in documents.items() if isinstance(document, Content)]
        num_tokens = 0
        with closing(called_on_each(lambda each: self._page(*each, ids, explain), contents)) as pages:
            for (i, _), page in zip(contents, pages, strict=True):
                found[i] = page
                if page.embedding is None:  # refuse too many before all are read
                    num_tokens += page.tokens
                    ids.check_tokens(num_tokens)
        return {i: found[i] for i in documents}

    def _page(self, index: int, content: Content, ids: RequestIds, explain: bool) -> Document:
        """Reads one content; the pixels of its pictures are in memory only meanwhile."""
        assert self._pages is not None
        name = InputName("documents", index)
        opened = self._pages.opened(content, name)
        key, entry = (None, None) if self._lookup is None else self._lookup.find_page(opened.digest)
        if entry is not None and not explain:
            return Document(0, [], entry)
        return Document(0, [self._pages.built(opened, self.builder.rules, name, ids)], entry, key)


class GivenVectors:
    """Checks embeddings that callers send: of at most `most` vectors each, and compared in `dtype`."""

    def __init__(self, model: LoadedModel, most: int | None, dtype: torch.dtype) -> None:
        self._model = model
        self._most = most
        self._dtype = dtype

    def documents(self, given: Mapping[int, Vectors]) -> Iterator[tuple[int, CachedEmbedding]]:
        """Yields documents by their index, to be scored as if they were cached."""
        left = iter(given.items())
        while part := dict(islice(left, _AT_ONCE)):
            yield_to_smaller()
            rows = [self._as_rows(vectors, "documents", index) for index, vectors in part.items()]
            self._check_finite(rows, "documents", [*part], self._dtype)
            for index, (values, scales) in zip(part, rows, strict=True):
                yield index, CachedEmbedding(values, scales, tokens=0, truncated=False)

    def query(self, vectors: Vectors, index: int) -> torch.Tensor:
        """Returns a query's rows [tokens, dim], without scales."""
        if isinstance(vectors, QueryRows) and vectors.fingerprint != self._model.fingerprint:
            what = "was encoded by another model than this one; encode it here, or give its text"
            raise InputName("queries", index).error(what)
        rows, scales = self._as_rows(vectors, "queries", index)
        if len(rows):
            # A single vector is compared in float32.
            dtype = self._dtype if self._model.score_task == "token_embed" else torch.float32
            self._check_finite([(rows, scales)], "queries", [index], dtype)
        return rows if scales is None else rows * scales[:, None]

    def _check_finite(
        self,
        rows: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        param: str,
        indexes: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """Refuses numbers that are NaN, or infinite in `dtype`; for int8, scales that might make them so."""
        numbers = torch.finfo(dtype)
        limit = numbers.max * (2 - numbers.eps / 2) / (2 - numbers.eps)  # the least that rounds to infinity
        arrays = [values if scales is None else scales for values, scales in rows]
        limits = [limit if scales is None else limit / _INT8_MAX for _, scales in rows]
        find = first_not_finite if kernels.is_available() else _first_not_finite
        if (found := find(arrays, limits)) is None:
            return
        largest, name = float(arrays[found].abs().max()), str(dtype).removeprefix("torch.")
        if not math.isfinite(largest):
            what = "has a number that is NaN or infinite"
        elif rows[found][1] is not None:
            what = f"has a scale of {largest:.3g}: {_INT8_MAX} times that is infinite in {name}; normalize it"
        else:
            what = f"has numbers up to {largest:.3g}, infinite in {name}; normalize it"
        raise InputName(param, indexes[found]).error(what)

    def _as_rows(self, vectors: Vectors, param: str, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        try:
            if self._model.items_have_ids and not isinstance(vectors, QueryRows):
                raise ValueError("cannot be scored as a vector by this model; give its text")
            rows, scales = vectors.as_rows(self._model.tasks[self._model.score_task].dim)
            if self._model.score_task == "embed" and len(rows) > 1:
                raise ValueError(f"has {len(rows)} vectors, but with this model a text has one")
            if self._most is not None and len(rows) > self._most:
                raise ValueError(
                    f"has {len(rows)} vectors, and at most {self._most} are taken; send it in parts, or "
                    "raise max_vectors"
                )
        except ValueError as error:
            raise InputName(param, index).error(error) from None
        return rows, scales


def overflow_error(
    request: ScoreRequest, document: int, largest_of_queries: Mapping[int, float]
) -> InvalidRequestError | None:
    """Returns the error for a sent embedding that makes a document's score infinite or NaN; None if there is
    none. `largest_of_queries` has the largest number of each query that was sent."""
    query = request.query_of(document)
    largest: dict[tuple[str, int], float] = {}
    dim = 0
    if isinstance(given := request.documents[document], Vectors):
        largest["documents", document], dim = given.largest, np.shape(given.values)[-1]
    if isinstance(given := request.queries[query], Vectors):
        largest["queries", query], dim = largest_of_queries.get(query, 0.0), np.shape(given.values)[-1]
    # Assume numbers of at most 1 in the vectors of a text.
    if dim * math.prod(largest.values()) <= _USUAL:
        return None
    param, index = name = max(largest, key=lambda each: largest[each])
    what = f"has numbers up to {largest[name]:.3g}, so that a score is not finite; normalize it"
    return InputName(param, index).error(what)


def _first_not_finite(arrays: Sequence[torch.Tensor], limits: Sequence[float]) -> int | None:
    """The same in plain torch: a NaN is both the least and the greatest."""
    for i, (array, limit) in enumerate(zip(arrays, limits, strict=True)):
        if not all(abs(float(each)) < limit for each in torch.aminmax(array)):
            return i
    return None
