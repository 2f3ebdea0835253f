"""Sets aside the device's memory for cached embeddings."""

import logging

import torch

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.open_cache import MIB
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.budget import bytes_a_token, free_bytes

log = logging.getLogger(__name__)

# Of what the model and a step's tensors leave free; keys, values and queries that are held need room too.
_SHARE = 0.25
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
    return min(cached, int(_SHARE * max(0, free - step)))


def rows_within(limit: int, dim: int, dtype: torch.dtype) -> int:
    """How many rows take at most `limit` bytes, those of int8 with their scales."""
    scale = torch.float32.itemsize if dtype is torch.int8 else 0
    return limit // (dim * dtype.itemsize + scale)
