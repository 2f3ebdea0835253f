"""How many tokens a step may have."""

from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig

ON_A_CPU, ON_A_GPU = 2_048, 16_384
_LEAST = 1_024
_LEAST_BESIDE_SMALL = 256
# Of a step, and of the usual one where a step must hold longer texts.
_SIXTEENTHS = 8

# A step's tensors may take this share of what is free; keys, values and queries that are held need room too.
_SHARE = 0.5


def step_tokens(
    config: EngineConfig, model: LoadedModel, device: torch.device, dtype: torch.dtype, chunked: bool
) -> int:
    """Tokens of a step: as configured, else by the memory that is free once the weights are loaded. To be
    called before anything else takes a share of that: graphs are captured and a slab is opened for steps of
    this size."""
    if config.max_batch_tokens is not None:
        return config.max_batch_tokens
    return default_budget(model, device, dtype, chunked)


def default_budget(model: LoadedModel, device: torch.device, dtype: torch.dtype, chunked: bool) -> int:
    """Tokens a step: many enough to keep the device busy, and few enough for the memory that it has left; as
    many as on a CPU where torch does not say how much that is.

    Without chunks a step must hold the longest sequence."""
    free = None if device.type == "cpu" else free_bytes(device)
    budget = ON_A_CPU if free is None else tokens_that_fit(free, bytes_a_token(model.backbone.config, dtype))
    return budget if chunked else max(budget, model.max_tokens)


def free_bytes(device: torch.device) -> int | None:
    """The memory that a device other than the CPU has left, with what torch holds of it unused; None where
    torch does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        if device.type == "mps":
            return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return int(torch.accelerator.get_memory_info(device)[0])
    except (AttributeError, RuntimeError):
        return None


def beside_small_requests(budget: int, device: torch.device) -> int | None:
    """How many tokens of larger requests a step may have while requests of a document or so come; None for as
    many as fit. On a CPU whoever comes meanwhile waits for a step, but short steps do less in all: with 8
    sixteenths small requests took 2.9 and 3.3 times as long at p99 as alone, and batches lost 9 and 12% of
    their throughput (`maxsimd bench mixed`, two runs). Of a GPU that has not been measured."""
    if device.type != "cpu":
        return None
    return min(budget, max(_LEAST_BESIDE_SMALL, _SIXTEENTHS * min(budget, ON_A_CPU) // 16))


def tokens_that_fit(free: int, bytes_a_token: int) -> int:
    """A power of two of tokens that take no more than their share of the free bytes; within bounds."""
    budget = ON_A_GPU
    while budget > _LEAST and budget * bytes_a_token > _SHARE * free:
        budget //= 2
    return budget


def bytes_a_token(config: Any, dtype: torch.dtype) -> int:
    """What a token takes at the widest place of a layer: what the feed-forward makes of it, twice, beside the
    layer's input, queries, keys, values and output; and, once, its float32 row for pooling."""
    text = config.get_text_config()
    hidden = int(getattr(text, "hidden_size", 1024))
    inner = int(getattr(text, "intermediate_size", 4 * hidden) or 4 * hidden)
    return (6 * hidden + 2 * inner) * dtype.itemsize + 4 * hidden
