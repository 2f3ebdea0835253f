"""Opens the configured caches, their slab on the device, and the calibration of a model."""

import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.documents import DocumentTexts
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
# A cache takes a sixteenth of the free memory by default, within these bounds.
_SHARE, _LEAST, _MOST = 16, 64 * MIB, 4096 * MIB
# A slab's share of the memory that the model and a step's tensors leave: keys, values and queries need room
# too.
_SLAB_SHARE = 0.25
# With fewer rows a slab holds only a few documents.
_FEWEST_ROWS = 1024


def open_cache(config: EngineConfig, model: LoadedModel, dtype: torch.dtype) -> EmbeddingCache | None:
    """None if the cache is off, or documents are not encoded by themselves."""
    if not model.encodes_apart or (config.cache_mb == 0 and config.cache_dir is None):
        return None
    precision = _precision(config, model, dtype)
    if config.cache_dir is None:
        # It holds only this model's embeddings, so its weights need not be read for a fingerprint.
        return EmbeddingCache(b"", precision, MemoryStore(memory_limit(config)), None)
    mark = fingerprint(ingredients(model, config, dtype, precision))
    disk = DiskStore(_folder(config.cache_dir), config.cache_disk_mb * MIB)
    return EmbeddingCache(mark, precision, MemoryStore(memory_limit(config)), disk)


def open_texts(config: EngineConfig) -> DocumentTexts | None:
    """The texts that requests name by digests; None if none are kept."""
    if config.document_store_mb == 0:
        return None
    folder = None if config.cache_dir is None else _folder(config.cache_dir)
    return DocumentTexts(config.document_store_mb * MIB, folder)


def _folder(cache_dir: str) -> Path:
    folder = os.path.expanduser(cache_dir)
    if folder.startswith("~"):
        raise ModelLoadError(
            f"cache_dir={cache_dir} begins with a home folder that does not exist; give the whole path"
        )
    return Path(folder)


def _precision(config: EngineConfig, model: LoadedModel, dtype: torch.dtype) -> Precision:
    """Raises ModelLoadError for a precision that would round token ids."""
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
    """The score cache of a model with one score per pair. None for other models, or if the cache is off."""
    has_scores = model.listwise is not None or (model.score_task == "classify" and len(model.labels) == 1)
    return ScoreCache(memory_limit(config)) if has_scores and config.cache_mb != 0 else None


def memory_limit(config: EngineConfig) -> int:
    """The bytes that a cache may take: as configured, or a share of the free memory."""
    if config.cache_mb is not None:
        return config.cache_mb * MIB
    free = available_memory()
    limit = _LEAST if free is None else min(_MOST, max(_LEAST, free // _SHARE))
    log.debug("the cache may take %d MiB of memory (cache_mb)", limit // MIB)
    return limit


def open_slab(
    config: EngineConfig,
    model: LoadedModel,
    cache: EmbeddingCache,
    device: torch.device,
    dtype: torch.dtype,
    takes_int8: bool,
    step_tokens: int,
) -> EmbeddingSlab | None:
    """The configured slab, which leaves room for a step of `step_tokens`. None if it is off, if there is no
    room, and on other devices than CUDA's.

    It holds embeddings as they are scored: in `dtype`, or as int8 if they are cached so and MaxSim
    `takes_int8`. Raises ModelLoadError if the device has less memory left than `device_cache_mb`, or for
    another accelerator."""
    if device.type not in ("cpu", "cuda") and config.device_cache_mb:
        raise ModelLoadError(
            f"device_cache_mb is for memory of CUDA devices, not of {device.type} devices: leave it out"
        )
    if device.type != "cuda" or config.device_cache_mb == 0:
        return None
    step_bytes = step_tokens * bytes_a_token(model.backbone.config, dtype)
    dtype = torch.int8 if takes_int8 and cache.precision == "int8" else dtype
    dim = model.tasks[model.score_task].dim
    # A share of what a step leaves, but no more than the host caches.
    limit = min(cache.limit, int(_SLAB_SHARE * max(0, (free_bytes(device) or 0) - step_bytes)))
    if config.device_cache_mb is not None:
        limit = config.device_cache_mb * MIB
    scale = torch.float32.itemsize if dtype is torch.int8 else 0
    rows = limit // (dim * dtype.itemsize + scale)
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


def model_digest(model: LoadedModel, config: EngineConfig) -> str:
    """The digest of everything that scores depend on, except rounding: weights, tokenizer, and how texts are
    read and compared. The backbone must be as loaded."""
    backbone: Any = model.backbone
    task, template = model.tasks[model.score_task], model.pairs.template
    heads, is_hybrid = enumerate(modules_of(task.head)), model.similarity == "hybrid"
    similarity = (model.similarity, model.hybrid_weights) if is_hybrid else model.similarity
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
        "similarity": similarity,
    }
    weights = {
        "backbone": digest_tensors([*backbone.named_parameters(), *saved_buffers(backbone)]),
        "head": digest_tensors(
            (f"{i}.{name}", tensor) for i, module in heads for name, tensor in module.named_parameters()
        ),
    }
    return fingerprint({name: repr(value).encode() for name, value in stated.items()} | weights).hex()


def digest_of(config: EngineConfig) -> str:
    """Loads the configured model for its digest. Raises ModelLoadError."""
    return model_digest(load_model(config, choose_device(config.device)), config)


def open_calibration(config: EngineConfig, model: LoadedModel) -> Calibration | None:
    """The configured calibration, if any. Raises ModelLoadError for an unreadable file, or another
    model's."""
    if config.calibration is None:
        return None
    try:
        calibration = Calibration.read(Path(config.calibration).expanduser())
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError without a home folder
        raise ModelLoadError(
            f"the calibration {config.calibration!r} cannot be read: {error}; make one with maxsimd calibrate"
        ) from error
    if calibration.model != model_digest(model, config):
        raise ModelLoadError(
            f"the calibration {config.calibration!r} is of another model, or of other prompts or dimensions; "
            "make one with maxsimd calibrate and the options of this server"
        )
    return calibration
