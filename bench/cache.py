"""The embedding cache: one request of many documents, encoded, kept in memory, and on disk over a restart."""

import asyncio
import statistics
import tempfile
import time
from dataclasses import replace

import click
import numpy as np
from scipy.stats import kendalltau

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.bench.report import write_json
from maxsimd.engine import CUT_LONG, Engine, EngineConfig

QUERY = "how is a file opened for reading"


async def measure_cache(config: EngineConfig, documents: int, rounds: int, json_file: str | None) -> None:
    """Prints medians of `rounds` requests, and what keeping does to scores and ranking."""
    texts = [pair.document for pair in docstring_pairs()]
    texts = [texts[i % len(texts)] + (f" {i}" if i >= len(texts) else "") for i in range(documents)]
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, cache_dir=folder, cache_mb=max(config.cache_mb, 2048))
        async with Engine(config) as engine:
            encoded, exact, tokens = await _time(engine, texts, "bypass", 1)
            await _time(engine, texts, "use", 1)
            kept, scores, _ = await _time(engine, texts, "use", rounds)
            cache = engine.on_device.cache
            assert cache is not None
            size = cache.memory_bytes
        started = time.perf_counter()
        async with Engine(config) as engine:
            await engine.score(QUERY, ["warm up"])
            first, _, _ = await _time(engine, texts, "use", 1)
        restart = time.perf_counter() - started
    figures = {
        "documents": documents,
        "tokens_a_document": round(tokens / documents, 1),
        "encoded_ms": round(encoded * 1e3, 1),
        "kept_in_memory_ms": round(kept * 1e3, 1),
        "after_a_restart_ms": round(first * 1e3, 1),
        "encoded_over_memory": round(encoded / kept, 1),
        "encoded_over_restart": round(encoded / first, 1),
        "start_and_first_request_s": round(restart, 2),
        "largest_difference_of_scores": float(np.abs(exact - scores).max()),
        "kendall_tau": round(float(kendalltau(exact, scores).statistic), 5),
        "kept_mb": round(size / 1e6, 1),
    }
    settings = {"model": config.model, "score_type": config.score_type, "precision": config.cache_precision}
    for name, value in figures.items():
        click.echo(f"  {name.replace('_', ' '):<32}{value:>14}")
    if json_file:
        write_json(json_file, {"settings": settings, "figures": figures})


async def _time(
    engine: Engine, texts: list[str], cache: str, rounds: int
) -> tuple[float, "np.ndarray[tuple[int], np.dtype[np.float64]]", int]:
    """The median time of a request, its scores and its tokens."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        result = await engine.score(QUERY, texts, truncation=CUT_LONG, cache=cache)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - started)
        await asyncio.sleep(0)
    return statistics.median(seconds), np.array(result.scores), result.usage.prompt_tokens
