"""How long a request of one line waits behind a crowd of requests whose documents are all cached."""

import asyncio
import statistics
import time
from dataclasses import replace

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.engine import CUT_LONG, Engine, EngineConfig

QUERY = "how is a file opened for reading"


async def measure_crowd(config: EngineConfig, requests: int, documents: int, rounds: int) -> dict[str, float]:
    """Medians of `rounds`: a one-line request alone, and sent right after `requests` others of `documents`
    cached documents each. The limit is three times the first and the longest step of the crowd."""
    texts = [pair.document for pair in docstring_pairs()]
    texts = [texts[i % len(texts)] + (f" {i}" if i >= len(texts) else "") for i in range(documents)]
    config = replace(config, cache_mb=max(config.cache_mb, 4096))
    alone, behind, crowds, steps = [], [], [], []
    async with Engine(config) as engine:
        await engine.score(QUERY, texts, truncation=CUT_LONG)
        for number in range(rounds):
            alone.append(await _line(engine, f"alone {number}"))
            before = _steps(engine)
            started = time.perf_counter()
            crowd = [
                asyncio.create_task(engine.score(f"{QUERY} {i}", texts, truncation=CUT_LONG))
                for i in range(requests)
            ]
            while engine.stats().waiting_tokens == 0:  # noqa: ASYNC110 (there is no event to wait for)
                await asyncio.sleep(0.0005)
            behind.append(await _line(engine, f"behind {number}"))
            await asyncio.gather(*crowd)
            crowds.append(time.perf_counter() - started)
            after = _steps(engine)
            steps.append((after[0] - before[0]) / max(1.0, after[1] - before[1]))
    limit = 3 * statistics.median(alone) + statistics.median(steps)
    return {
        "crowd_requests": requests,
        "documents_each": documents,
        "alone_ms": round(statistics.median(alone) * 1e3, 2),
        "behind_the_crowd_ms": round(statistics.median(behind) * 1e3, 2),
        "mean_step_ms": round(statistics.median(steps) * 1e3, 2),
        "limit_ms": round(limit * 1e3, 2),
        "crowd_ms": round(statistics.median(crowds) * 1e3, 1),
        "behind_over_limit": round(statistics.median(behind) / limit, 3),
    }


async def _line(engine: Engine, text: str) -> float:
    """Seconds of a request with one short document that is not cached."""
    started = time.perf_counter()
    await engine.score(QUERY, [text])
    return time.perf_counter() - started


def _steps(engine: Engine) -> tuple[float, float]:
    """Seconds of all steps so far, and their number."""
    value = engine.metrics.registry.get_sample_value
    return value("maxsimd_step_seconds_sum") or 0.0, value("maxsimd_step_seconds_count") or 0.0
