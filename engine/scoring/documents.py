"""What scoring is given beside new embeddings: documents that need not be run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

from maxsimd.engine.cache.entry import CachedEmbedding
from maxsimd.scheduler import Explained, ResultSlot, TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class CachedDocument:
    """A document whose embedding was cached when its request came, to be scored against one of its queries.
    If its score is to be explained, `explained` says how, with the vectors of its windows."""

    slot: ResultSlot
    embedding: CachedEmbedding
    explained: Explained | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CachedDocuments:
    """The documents of a `CachedBatch`, which names the query, by columns, so that the device thread need not
    look at each. `keys` are those of the cache, and `explained` has the indices of those that are to be."""

    slots: tuple[ResultSlot, ...]
    embeddings: tuple[CachedEmbedding, ...]
    keys: tuple[bytes | None, ...]
    explained: Mapping[int, Explained]

    @classmethod
    def of(cls, documents: Sequence[CachedDocument]) -> Self:
        return cls(
            tuple(document.slot for document in documents),
            tuple(document.embedding for document in documents),
            tuple(document.embedding.key for document in documents),
            {i: each.explained for i, each in enumerate(documents) if each.explained is not None},
        )

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class CacheHit:
    """A sequence of a step that is not run, because its embedding has been cached since its request came."""

    sequence: TokenSequence
    embedding: CachedEmbedding


@dataclass(frozen=True, slots=True, eq=False)
class Duplicate:
    """A sequence of a step that is not run, because an equal document comes before it in the step."""

    sequence: TokenSequence


SkippedSequence: TypeAlias = CacheHit | Duplicate
