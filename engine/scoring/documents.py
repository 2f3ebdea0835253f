"""What scoring is given beside new embeddings, documents that were not run; and what it could not score."""

from dataclasses import dataclass

from maxsimd.engine.cache.entry import CachedEmbedding
from maxsimd.scheduler import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class KeptDocument:
    """A document that need not be run: what is kept of it, to be scored against the query with the key
    `query` and delivered as value `index` of its request."""

    request: int
    index: int
    query: int
    embedding: CachedEmbedding


@dataclass(frozen=True, slots=True, eq=False)
class KnownSequence:
    """A sequence of a step that was not run: its embedding is kept, or, if None, comes with an equal one."""

    sequence: Sequence
    embedding: CachedEmbedding | None


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that cannot be completed, and why."""

    request: int
    reason: str
