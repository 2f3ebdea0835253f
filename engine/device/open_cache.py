"""Opens the cache that a configuration asks for, under a fingerprint of the model it belongs to."""

import os
from pathlib import Path

import torch

from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.entry import Precision
from maxsimd.engine.cache.fingerprint import fingerprint, ingredients
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.cache.scores import ScoreCache
from maxsimd.engine.cache.store import EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig

MIB = 1024 * 1024


def open_cache(config: EngineConfig, model: LoadedModel, dtype: torch.dtype) -> EmbeddingCache | None:
    """None where it is off, or where documents are not encoded by themselves."""
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


def open_score_cache(config: EngineConfig, model: LoadedModel) -> ScoreCache | None:
    """The cache of a model that reads query and document together, one score a pair; None for others, or
    where it is off. There are no scores in it but this model's."""
    has_scores = model.listwise is not None or (model.score_task == "classify" and len(model.labels) == 1)
    return ScoreCache(config.cache_mb * MIB) if has_scores and config.cache_mb else None
