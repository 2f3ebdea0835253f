"""The embedding cache: one request, encoded, cached in memory, and on disk over a restart."""

import statistics
import tempfile
import time
from dataclasses import replace

import numpy as np
from scipy.stats import kendalltau

from maxsimd.bench.datasets import QUERY, docstring_pairs
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, ScoreResult
from maxsimd.engine.requests import CacheMode


async def measure_cache(config: EngineConfig, documents: int, rounds: int) -> dict[str, float]:
    """Medians of `rounds` requests each, every one after a restart the first of its engine, and what keeping
    does to scores and ranking."""
    texts = [pair.document for pair in docstring_pairs()]
    texts = [texts[i % len(texts)] + (f" {i}" if i >= len(texts) else "") for i in range(documents)]
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, cache_dir=folder, cache_mb=max(config.cache_mb or 0, 2048))
        encoded, cached, restarted = [], [], []
        async with Engine(config) as engine:
            await _timed(engine, texts, "use")
            for _ in range(rounds):
                encoded.append(await _timed(engine, texts, "bypass"))
                cached.append(await _timed(engine, texts, "use"))
            cache = engine.device_model.cache
            assert cache is not None
            size = cache.memory_bytes
        for _ in range(rounds):
            async with Engine(config) as engine:
                await engine.score(QUERY, ["warm up"])
                restarted.append(await _timed(engine, texts, "use"))
    slow, fast, first = (
        statistics.median(seconds for seconds, _ in turns) for turns in (encoded, cached, restarted)
    )
    exact, others = encoded[0][1], [result for _, result in cached + restarted]
    return {
        "documents": documents,
        "tokens_a_document": round(exact.usage.prompt_tokens / documents, 1),
        "encoded_ms": round(slow * 1e3, 1),
        "cached_in_memory_ms": round(fast * 1e3, 1),
        "after_a_restart_ms": round(first * 1e3, 1),
        "slowest_after_a_restart_ms": round(max(seconds for seconds, _ in restarted) * 1e3, 1),
        "encoded_over_memory": round(slow / fast, 1),
        "encoded_over_restart": round(slow / first, 1),
        "largest_difference_of_scores": max(
            float(np.abs(np.subtract(exact.scores, other.scores)).max()) for other in others
        ),
        "kendall_tau": min(
            round(float(kendalltau(exact.scores, other.scores).statistic), 5) for other in others
        ),
        "cached_mb": round(size / 1e6, 1),
    }


async def _timed(engine: Engine, texts: list[str], cache: CacheMode) -> tuple[float, ScoreResult]:
    started = time.perf_counter()
    result = await engine.score(QUERY, texts, truncation=CUT_LONG, cache=cache)
    return time.perf_counter() - started, result
