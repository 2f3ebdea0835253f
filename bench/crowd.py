"""How long a request of one line waits behind a crowd of requests whose documents are all cached."""

import asyncio
import statistics
import time
from dataclasses import replace
from typing import Any

from maxsimd.api.process import garbage_left_alone, switching_often
from maxsimd.bench.datasets import QUERY, docstring_pairs
from maxsimd.engine import CUT_LONG, Engine, EngineConfig


async def measure_crowd(config: EngineConfig, requests: int, documents: int, rounds: int) -> dict[str, float]:
    """Medians of `rounds`: a one-line request alone, and sent right after `requests` others of `documents`
    cached documents each. The limit is three times the first, and the step that it stands behind: the first
    to end after it was sent. In an interpreter that is set up as the server's is."""
    texts = [pair.document for pair in docstring_pairs()]
    texts = [texts[i % len(texts)] + (f" {i}" if i >= len(texts) else "") for i in range(documents)]
    config = replace(config, cache_mb=max(config.cache_mb or 0, 4096))
    with switching_often():
        async with Engine(config) as engine:
            await engine.score(QUERY, texts, truncation=CUT_LONG)
            with garbage_left_alone():
                figures = [await _round(engine, texts, requests, number) for number in range(rounds)]
    names = ("alone_ms", "behind_the_crowd_ms", "step_ms", "mean_step_ms", "crowd_ms")
    medians = {
        name: round(statistics.median(values) * 1e3, 2)
        for name, values in zip(names, zip(*figures, strict=True), strict=True)
    }
    limit = 3 * medians["alone_ms"] + medians["step_ms"]
    return {
        "crowd_requests": requests,
        "documents_each": documents,
        **medians,
        "limit_ms": round(limit, 2),
        "behind_over_limit": round(medians["behind_the_crowd_ms"] / limit, 3),
    }


async def _round(engine: Engine, texts: list[str], requests: int, number: int) -> tuple[float, ...]:
    """Seconds: the request alone, behind the crowd, the step it stood behind, the mean step, the crowd."""
    alone = await _line(engine, f"alone {number}")
    steps = _StepSeconds()
    metrics: Any = engine.metrics
    metrics.step_seconds, usual = steps, metrics.step_seconds
    started = time.perf_counter()
    crowd = [
        asyncio.create_task(engine.score(f"{QUERY} {number} {i}", texts, truncation=CUT_LONG))
        for i in range(requests)
    ]
    while engine.stats().steps_in_flight == 0:  # noqa: ASYNC110 (there is no event to wait for)
        await asyncio.sleep(0.0005)
    num_before = len(steps)
    behind = await _line(engine, f"behind {number}")
    await asyncio.gather(*crowd)
    crowd_seconds = time.perf_counter() - started
    metrics.step_seconds = usual
    return alone, behind, steps[num_before], statistics.mean(steps), crowd_seconds


class _StepSeconds(list[float]):
    """Keeps each step's seconds, in the place of a histogram."""

    def observe(self, seconds: float) -> None:
        self.append(seconds)


async def _line(engine: Engine, text: str) -> float:
    """Seconds of a request with one short document that is not cached."""
    started = time.perf_counter()
    await engine.score(QUERY, [text])
    return time.perf_counter() - started
