"""Opens the cache that a configuration asks for, under a fingerprint of the model it belongs to."""

import logging
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
from maxsimd.engine.device.memory import free_memory
from maxsimd.engine.errors import ModelLoadError

log = logging.getLogger(__name__)

MIB = 1024 * 1024
# What a cache may take of the memory that is free when it is opened, unless it is configured: a sixteenth,
# but not less and not more than this.
_SHARE, _LEAST, _MOST = 16, 64 * MIB, 4096 * MIB


def open_cache(config: EngineConfig, model: LoadedModel, dtype: torch.dtype) -> EmbeddingCache | None:
    """None where it is off, or where documents are not encoded by themselves."""
    if not model.encodes_apart or (config.cache_mb == 0 and config.cache_dir is None):
        return None
    precision = _precision(config, model, dtype)
    if config.cache_dir is None:
        # There are no embeddings but this model's, and its weights need not be read.
        return EmbeddingCache(b"", precision, MemoryStore(memory_limit(config)), None)
    mark = fingerprint(ingredients(model, config, dtype, precision))
    folder = Path(os.path.expanduser(config.cache_dir))
    if str(folder).startswith("~"):
        raise ModelLoadError(
            f"cache_dir={config.cache_dir} begins with a home folder that does not exist; give the whole path"
        )
    disk = DiskStore(folder, config.cache_disk_mb * MIB)
    return EmbeddingCache(mark, precision, MemoryStore(memory_limit(config)), disk)


def _precision(config: EngineConfig, model: LoadedModel, dtype: torch.dtype) -> Precision:
    """Raises ModelLoadError for one that would round ids of tokens."""
    if model.items_have_ids:
        if config.cache_precision not in ("auto", "float32"):
            raise ModelLoadError(
                f"cache_precision={config.cache_precision} would round the ids of words in sparse vectors; "
                "leave it out, or set float32"
            )
        return "float32"
    if config.cache_precision != "auto":
        return config.cache_precision
    return "float32" if dtype is torch.float32 else "bfloat16"


def open_score_cache(config: EngineConfig, model: LoadedModel) -> ScoreCache | None:
    """The cache of a model that reads query and document together, one score a pair; None for others, or
    where it is off. There are no scores in it but this model's."""
    has_scores = model.listwise is not None or (model.score_task == "classify" and len(model.labels) == 1)
    return ScoreCache(memory_limit(config)) if has_scores and config.cache_mb != 0 else None


def memory_limit(config: EngineConfig) -> int:
    """How many bytes a cache may take: as configured, or a part of what is free now."""
    if config.cache_mb is not None:
        return config.cache_mb * MIB
    free = free_memory()
    limit = _LEAST if free is None else min(_MOST, max(_LEAST, free // _SHARE))
    log.debug("the cache may take %d MiB of memory (cache_mb)", limit // MIB)
    return limit
