"""What preprocessing makes of a request."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.cache import CachedEmbedding
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.processors.combine import Combine, NoScores, one_each
from maxsimd.engine.processors.given_vectors import OverflowCheck
from maxsimd.engine.requests import EmbedRequest, ScoreRequest, Usage, Values
from maxsimd.scheduler import CachedBatch, ImageJob, Role, Sequence

# From the values of a request to how a document, by its index, came to its score; None where it has none.
Explain: TypeAlias = Callable[[Values, int], Explanation | None]


@dataclass(frozen=True, slots=True, eq=False)
class PairFacts:
    """Of each document of a request: how many tokens are run for it with its query, how many inputs were cut
    for it, whether its query was, and through how many windows it is read. Where documents are run together,
    the first stands for all."""

    tokens: ListOf[int]
    truncated: ListOf[int]
    query_truncated: ListOf[bool]
    windows: ListOf[int]


@dataclass(frozen=True, slots=True)
class EncodedBefore:
    """Of queries that were encoded by requests of their own: how many tokens were run for them, and how many
    were cut."""

    tokens: int = 0
    truncated: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The sequences of a request, queries first, the documents whose embeddings are cached, and the pictures
    that sequences have, in the same order.

    They give `results` values, from which `combine` makes the scores of a score request. `truncated` counts
    the inputs that were cut, `truncated_queries` the queries among them, and `errors` says of documents why
    they cannot be read. Where token embeddings are scored, `query_rows` says of the query of each document
    how many tokens take part; where pairs are, `facts` says what is known of them. There are
    `cached_documents`, with `cached_tokens`, whose scores were cached. `cache_scores` is to be given the
    scores of all documents, as the model makes them, NaN for none. Of texts to embed the `cached_rows` are
    the token vectors of those that were cached, by index; these have no value. `explain` tells how documents
    came to their scores, of a request that asks for that. Queries that were `encoded_before` are among what
    was cut, and not among the sequences. Where embeddings came with the request, `overflow_check` tells
    whether they are why a value is not finite."""

    sequences: list[Sequence]
    results: int
    truncated: int
    combine: Combine = one_each
    cached: list[CachedBatch] = field(default_factory=list)
    images: list[ImageJob] = field(default_factory=list)
    errors: Mapping[int, str] = field(default_factory=dict)
    query_rows: NDArray[np.int64] | None = None
    facts: PairFacts | None = None
    cached_documents: int = 0
    cached_tokens: int = 0
    cached_rows: Mapping[int, CachedEmbedding] = field(default_factory=dict)
    cache_scores: Callable[[NDArray[np.float32]], None] | None = None
    explain: Explain | None = None
    truncated_queries: int = 0
    encoded_before: EncodedBefore = field(default_factory=EncodedBefore)
    overflow_check: OverflowCheck | None = None

    @property
    def num_new_tokens(self) -> int:
        """Tokens to be run."""
        return sum(sequence.num_new_tokens for sequence in self.sequences)


def nothing_of(request: ScoreRequest | EmbedRequest) -> Prepared:
    """What is made of a request that there was no time to prepare."""
    documents = len(request.documents) if isinstance(request, ScoreRequest) else len(request.texts)
    return Prepared([], 0, 0, NoScores(documents))


def usage_of(prepared: Prepared) -> Usage:
    """What a request used, in tokens."""
    tokens = sum(len(sequence) for sequence in prepared.sequences if not sequence.is_prefix)
    # Of documents that came as their embeddings no token was run.
    of_each = [embedding.tokens for batch in prepared.cached for embedding in batch.documents.embeddings]
    cached = [run for run in of_each if run]
    tokens += sum(cached) + prepared.cached_tokens
    of_queries = sum(len(each) for each in prepared.sequences if each.payload.role is Role.QUERY)
    cached_tokens = tokens - prepared.num_new_tokens
    before = prepared.encoded_before.tokens
    cached_documents = len(cached) + prepared.cached_documents
    return Usage(tokens + before, cached_tokens, cached_documents, of_queries + before)
