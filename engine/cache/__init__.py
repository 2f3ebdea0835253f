"""The caches: a document that has been encoded is not encoded again, nor a pair scored again.

Stored by content; embeddings in memory and, if asked for, on disk, scores in memory. Safe to use from any
thread.
"""

from maxsimd.engine.cache.arriving import About, Arriving
from maxsimd.engine.cache.entry import CachedEmbedding, Precision
from maxsimd.engine.cache.scores import CachedScore, ScoreCache
from maxsimd.engine.cache.store import EmbeddingCache

__all__ = ["About", "Arriving", "CachedEmbedding", "CachedScore", "EmbeddingCache", "Precision", "ScoreCache"]
