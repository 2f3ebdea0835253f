"""Caches of embeddings (in memory, on disk, on the device) and of scores, by content. Thread-safe."""

from maxsimd.engine.cache.embeddings import CachedEmbedding as CachedEmbedding
from maxsimd.engine.cache.embeddings import EmbeddingFacts as EmbeddingFacts
from maxsimd.engine.cache.embeddings import PendingEmbeddings as PendingEmbeddings
from maxsimd.engine.cache.embeddings import Precision as Precision
from maxsimd.engine.cache.store import EmbeddingCache as EmbeddingCache
from maxsimd.engine.cache.store import ScoreCache as ScoreCache
