"""The embedding cache: a document that has been encoded is not encoded again.

Stored by content, in memory and, if asked for, on disk; safe to use from any thread.
"""

from maxsimd.engine.cache.arriving import About, Arriving
from maxsimd.engine.cache.entry import CachedEmbedding, Precision
from maxsimd.engine.cache.store import EmbeddingCache

__all__ = ["About", "Arriving", "CachedEmbedding", "EmbeddingCache", "Precision"]
