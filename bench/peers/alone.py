"""What no peer does: this server beside itself, with and without."""

from collections.abc import Awaitable, Callable
from typing import Any

from maxsimd.bench.cache import measure_cache
from maxsimd.bench.datasets import docstring_requests
from maxsimd.bench.prefix import measure_prefix_sharing
from maxsimd.bench.scaling import measure_scaling
from maxsimd.bench.targets import run_engine
from maxsimd.engine import EngineConfig

Figures = dict[str, Any]

# Minutes each, and what they show hardly varies.
_SCALING_ROUNDS = 2
_RANKED_REQUESTS = 100


async def _ranking(rounds: int) -> Figures:
    """How the embedded model ranks docstrings with int8 weights, and without."""
    workload = {
        "dataset": "docstrings",
        "documents": 100,
        "concurrency": 4,
        "request_rate": None,
        "cache": "bypass",
        "warmup": 5,
        "seed": 0,
    }
    requests = docstring_requests(_RANKED_REQUESTS + 5, 100, seed=0)
    rounded = await run_engine(EngineConfig(quantization="int8"), requests, workload)
    rounded.add_cost_in_ranking(await run_engine(EngineConfig(), requests, workload))
    shown = ("requests", "failures", "documents_per_s", "documents_per_s_without")
    return {name: rounded.figures()[name] for name in (*shown, "mrr", "mrr_without", "mrr_cost")}


ALONE: dict[str, Callable[[int], Awaitable[Figures]]] = {
    "cache": lambda rounds: measure_cache(EngineConfig(), 1000, rounds),
    "cache-int8": lambda rounds: measure_cache(EngineConfig(cache_precision="int8"), 1000, rounds),
    "prefix": lambda rounds: measure_prefix_sharing(100, 0.4, rounds),
    "scaling": lambda rounds: measure_scaling(None, 64, _SCALING_ROUNDS),
    "ranking": _ranking,
}
