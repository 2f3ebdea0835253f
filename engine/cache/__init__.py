"""The caches: a document that has been encoded is not encoded again, nor a pair scored again.

Stored by content; embeddings in memory and, if asked for, on disk, scores in memory. Safe to use from any
thread.
"""

from maxsimd.engine.cache.embeddings import CachedEmbedding, EmbeddingFacts, PendingEmbeddings, Precision
from maxsimd.engine.cache.store import CachedScore, EmbeddingCache, ScoreCache

__all__ = [
    "CachedEmbedding",
    "CachedScore",
    "EmbeddingCache",
    "EmbeddingFacts",
    "PendingEmbeddings",
    "Precision",
    "ScoreCache",
]
