"""Opens the cache that a configuration asks for, under a fingerprint of the model it belongs to."""

import os
from pathlib import Path

import torch

from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.entry import Precision
from maxsimd.engine.cache.fingerprint import fingerprint, ingredients
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.cache.store import EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig

MIB = 1024 * 1024


def open_cache(config: EngineConfig, model: LoadedModel, dtype: torch.dtype) -> EmbeddingCache | None:
    """None where it is off, or where there is nothing to keep: cross-encoders keep no documents."""
    two_stage = model.score_task in ("embed", "token_embed")
    if not two_stage or (config.cache_mb == 0 and config.cache_dir is None):
        return None
    precision: Precision = config.cache_precision if config.cache_precision != "auto" else "bfloat16"
    if config.cache_precision == "auto" and dtype is torch.float32:
        precision = "float32"
    if config.cache_dir is None:
        # There are no embeddings but this model's, and its weights need not be read.
        return EmbeddingCache(b"", precision, MemoryStore(config.cache_mb * MIB), None)
    mark = fingerprint(ingredients(model, config, dtype, precision))
    disk = DiskStore(Path(os.path.expanduser(config.cache_dir)), config.cache_disk_mb * MIB)
    return EmbeddingCache(mark, precision, MemoryStore(config.cache_mb * MIB), disk)
