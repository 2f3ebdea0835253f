"""A cross-encoder that is asked the same again: scores of pairs from the cache beside those that are run."""

import statistics
import tempfile
import time
from pathlib import Path

from maxsimd.bench.datasets import QUERY, docstring_pairs
from maxsimd.bench.peers.checkpoints import save_cross_encoder
from maxsimd.engine import Engine, EngineConfig, ScoreResult
from maxsimd.engine.requests import CacheMode


async def measure_cached_pairs(model: str | None, documents: int, rounds: int) -> dict[str, float]:
    """Medians of `rounds` requests each, run and from the cache in turns."""
    texts = [pair.document for pair in docstring_pairs()][:documents]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = model or save_cross_encoder(Path(folder))
        run, cached = [], []
        async with Engine(EngineConfig(model=checkpoint)) as engine:
            await _timed(engine, texts, "use")
            for _ in range(rounds):
                run.append(await _timed(engine, texts, "bypass"))
                cached.append(await _timed(engine, texts, "use"))
    slow, fast = (statistics.median(seconds for seconds, _ in turns) for turns in (run, cached))
    scores = [result.scores for _, result in (*run, *cached)]
    return {
        "documents": len(texts),
        "tokens_a_document": round(run[0][1].usage.prompt_tokens / len(texts), 1),
        "run_ms": round(slow * 1e3, 1),
        "cached_ms": round(fast * 1e3, 2),
        "run_over_cached": round(slow / fast, 1),
        "answers_with_other_bits": sum(each != scores[0] for each in scores),
    }


async def _timed(engine: Engine, texts: list[str], cache: CacheMode) -> tuple[float, ScoreResult]:
    started = time.perf_counter()
    result = await engine.score(QUERY, texts, cache=cache)
    return time.perf_counter() - started, result
