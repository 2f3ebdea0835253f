"""Opens the cache that a configuration asks for, under a fingerprint of the model it belongs to."""

import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.embeddings import Precision
from maxsimd.engine.cache.fingerprint import (
    digest_tensors,
    fingerprint,
    ingredients,
    saved_buffers,
    settings_of,
    stated_tokenizer,
)
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.engine.cache.store import EmbeddingCache, MemoryStore, ScoreCache
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.checkpoint.heads import modules_of
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.host import available_memory
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution import choose_device
from maxsimd.engine.execution.devices import bytes_a_token, free_bytes
from maxsimd.engine.scoring.scale import Calibration

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
    free = available_memory()
    limit = _LEAST if free is None else min(_MOST, max(_LEAST, free // _SHARE))
    log.debug("the cache may take %d MiB of memory (cache_mb)", limit // MIB)
    return limit


# Of what the model and a step's tensors leave free; keys, values and queries that are held need room too.
_SLAB_SHARE = 0.25
# With fewer rows a slab holds no more than a few documents.
_FEWEST_ROWS = 1024


def open_slab(
    config: EngineConfig,
    model: LoadedModel,
    cache: EmbeddingCache,
    device: torch.device,
    dtype: torch.dtype,
    takes_int8: bool,
    step_tokens: int,
) -> EmbeddingSlab | None:
    """The slab that a configuration asks for; None where it is off, where there is no room for it, and on
    devices other than CUDA's. It holds embeddings as they are scored: in `dtype`, or as int8 if they are
    cached so and MaxSim `takes_int8`. It leaves room for a step of `step_tokens`. Raises
    ModelLoadError if the device has less memory left than `device_cache_mb`, or if that is set for an
    accelerator other than CUDA's."""
    if device.type not in ("cpu", "cuda") and config.device_cache_mb:
        raise ModelLoadError(
            f"device_cache_mb is for memory of CUDA devices, not of {device.type} devices: leave it out"
        )
    if device.type != "cuda" or config.device_cache_mb == 0:
        return None
    step_bytes = step_tokens * bytes_a_token(model.backbone.config, dtype)
    dtype = torch.int8 if takes_int8 and cache.precision == "int8" else dtype
    dim = model.tasks[model.score_task].dim
    if config.device_cache_mb is None:
        limit = default_limit(free_bytes(device) or 0, step_bytes, cache.limit)
    else:
        limit = config.device_cache_mb * MIB
    rows = rows_within(limit, dim, dtype)
    if rows < _FEWEST_ROWS:
        return None
    try:
        slab = EmbeddingSlab(rows, dim, dtype, device)
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"the GPU has no {limit // MIB} MiB left for cached embeddings; set device_cache_mb lower"
        ) from error
    log.debug("cached embeddings may take %d MiB of the GPU's memory (device_cache_mb)", slab.nbytes // MIB)
    return slab


def default_limit(free: int, step: int, cached: int) -> int:
    """How many bytes a slab takes where nobody said, of `free` ones: a share of what a step's tensors leave,
    and no more than what may be `cached` at all."""
    return min(cached, int(_SLAB_SHARE * max(0, free - step)))


def rows_within(limit: int, dim: int, dtype: torch.dtype) -> int:
    """How many rows take at most `limit` bytes, those of int8 with their scales."""
    scale = torch.float32.itemsize if dtype is torch.int8 else 0
    return limit // (dim * dtype.itemsize + scale)


def model_digest(model: LoadedModel, config: EngineConfig) -> str:
    """The digest of all that scores depend on, but for rounding: weights, tokeniser, and how texts are read
    and compared. The backbone must be as it was loaded."""
    backbone: Any = model.backbone
    task, template = model.tasks[model.score_task], model.pairs.template
    heads = enumerate(modules_of(task.head))
    stated = {
        "architecture": model.architecture,
        "settings": settings_of(backbone.config)[0],
        "tokenizer": stated_tokenizer(model.tokenizer),
        "prompts": (model.query.prompt, model.document.prompt, model.instruction),
        "template": template and [(each.name, getattr(template, each.name)) for each in fields(template)],
        "truncation": (model.truncation_side, model.pairs.truncation),
        "padding": (model.uncounted_id, model.ending_pad_id),
        # Softmax or a sigmoid of each label; a function's repr holds its address.
        "label": (model.score_label, model.probabilities is torch.sigmoid),
        "lengths": (model.max_tokens, model.query.max_tokens, model.document.max_tokens),
        "pooling": (task.pooling, task.dim, config.doc_token_pooling),
        "heads": [repr(module) for module in modules_of(task.head)],
        "similarity": _similarity(model),
    }
    weights = {
        "backbone": digest_tensors([*backbone.named_parameters(), *saved_buffers(backbone)]),
        "head": digest_tensors(
            (f"{i}.{name}", tensor) for i, module in heads for name, tensor in module.named_parameters()
        ),
    }
    return fingerprint({name: repr(value).encode() for name, value in stated.items()} | weights).hex()


def _similarity(model: LoadedModel) -> object:
    return (model.similarity, model.hybrid_weights) if model.similarity == "hybrid" else model.similarity


def digest_of(config: EngineConfig) -> str:
    """That of the model which a configuration names; it is loaded for this. Raises ModelLoadError."""
    return model_digest(load_model(config, choose_device(config.device)), config)


def open_calibration(config: EngineConfig, model: LoadedModel) -> Calibration | None:
    """None where none is named. Raises ModelLoadError for a file that cannot be read, or is another
    model's."""
    if config.calibration is None:
        return None
    try:
        calibration = Calibration.read(Path(config.calibration).expanduser())
    except (OSError, ValueError, RuntimeError) as error:  # the last where there is no home folder
        raise ModelLoadError(
            f"the calibration {config.calibration!r} cannot be read: {error}; make one with maxsimd calibrate"
        ) from error
    if calibration.model != model_digest(model, config):
        raise ModelLoadError(
            f"the calibration {config.calibration!r} is of another model, or of other prompts or dimensions; "
            "make one with maxsimd calibrate and the options of this server"
        )
    return calibration
