"""Caches of embeddings (in memory, on disk, on the device) and of scores, by content. Thread-safe."""

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
