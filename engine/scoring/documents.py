"""What scoring is given beside new embeddings: documents that need not be run."""

from dataclasses import dataclass
from typing import TypeAlias

from maxsimd.engine.cache.entry import CachedEmbedding
from maxsimd.scheduler import Explained, ResultSlot, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class CachedDocument:
    """A document whose embedding was cached when its request came; one of a `CachedBatch`, which names the
    query. If its score is to be explained, `explained` says how, with the vectors of its
    windows."""

    slot: ResultSlot
    embedding: CachedEmbedding
    explained: Explained | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CacheHit:
    """A sequence of a step that is not run, because its embedding has been cached since its request came."""

    sequence: Sequence
    embedding: CachedEmbedding


@dataclass(frozen=True, slots=True, eq=False)
class Duplicate:
    """A sequence of a step that is not run, because an equal document comes before it in the step."""

    sequence: Sequence


SkippedSequence: TypeAlias = CacheHit | Duplicate
