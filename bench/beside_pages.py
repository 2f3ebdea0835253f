"""One-document requests of text while many pages wait: how long they take beside how long they take alone,
and how long one pass of the vision tower takes."""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.bench.drawn_pages import draw_pages
from maxsimd.bench.page_models import SHAPES
from maxsimd.engine import Engine, EngineConfig

_QUERY, _DOCUMENT = "w1 w2 w3", "w4 w5 w6 w7 w8 w9"
_IDLE = 200


async def measure_beside_pages(shape: str, pages: int, layers: int) -> dict[str, float]:
    """Quantiles in milliseconds. The pages come as one request of the same priority."""
    drawn = draw_pages(docstring_pairs()[:pages], seed=0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = SHAPES[shape](Path(folder) / "model", layers)
        async with Engine(EngineConfig(model=checkpoint)) as engine:
            passes = _timed_passes(engine)
            for _ in range(20):
                await _one(engine)
            idle = [await _one(engine) for _ in range(_IDLE)]
            passes.clear()
            waiting = asyncio.create_task(engine.score(_QUERY, drawn, cache="bypass"))
            beside = []
            await asyncio.sleep(0.2)
            while not waiting.done():
                beside.append(await _one(engine))
                await asyncio.sleep(0.02)
            await waiting
    longest = max(passes)
    p99_idle, p99_beside = (float(np.quantile(each, 0.99)) for each in (idle, beside))
    return {
        "pages": float(len(drawn)),
        "requests_beside": float(len(beside)),
        "idle_p50_ms": round(float(np.median(idle)) * 1e3, 2),
        "idle_p99_ms": round(p99_idle * 1e3, 2),
        "beside_p50_ms": round(float(np.median(beside)) * 1e3, 2),
        "beside_p99_ms": round(p99_beside * 1e3, 2),
        "vision_passes": float(len(passes)),
        "longest_vision_pass_ms": round(longest * 1e3, 2),
        "allowed_p99_ms": round((longest + 2 * p99_idle) * 1e3, 2),
    }


async def _one(engine: Engine) -> float:
    started = time.perf_counter()
    await engine.score(_QUERY, _DOCUMENT, cache="bypass")
    return time.perf_counter() - started


def _timed_passes(engine: Engine) -> list[float]:
    """How long each pass of the vision tower takes from now on."""
    runner: Any = engine.device_model.runner
    passes: list[float] = []
    encode = runner.encode

    def timed(images: Any) -> None:
        started = time.perf_counter()
        encode(images)
        passes.append(time.perf_counter() - started)

    runner.encode = timed
    return passes
