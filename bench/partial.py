"""Requests whose time is up before they are done: how much of them is scored, and when the answer comes."""

import statistics
import time
from itertools import pairwise
from typing import Any

import numpy as np

from maxsimd.bench.datasets import QUERY, numbered_documents
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, RerankResult


async def measure_partial(config: EngineConfig, documents: int, share: float, rounds: int) -> dict[str, Any]:
    """A request of `documents` whole, and with `share` of that time for a timeout and a partial result,
    in turns; medians, but the worst of what has to hold each time."""
    texts = numbered_documents(documents)
    found: list[tuple[float, ...]] = []
    wrong = 0
    async with Engine(config) as engine:
        await engine.score(QUERY, texts[:200], truncation=CUT_LONG, cache="bypass")
        for _ in range(rounds):
            started = time.perf_counter()
            whole = await engine.rerank(QUERY, texts, cache="bypass")
            seconds = time.perf_counter() - started
            before = _steps(engine)
            started = time.perf_counter()
            partial = await engine.rerank(
                QUERY, texts, cache="bypass", timeout=share * seconds, on_timeout="partial"
            )
            took = time.perf_counter() - started
            steps, step_seconds = (after - b for after, b in zip(_steps(engine), before, strict=True))
            late, scored = took - share * seconds, len(partial.results) / documents
            found.append((seconds, took, late, step_seconds / max(1, steps), scored))
            wrong += _wrong(whole, partial, documents)
    whole_s, partial_s, overtime, step_s, shares = zip(*found, strict=True)
    return {
        "documents": documents,
        "whole_s": round(statistics.median(whole_s), 3),
        "timeout_over_whole": round(share, 3),
        "partial_s": round(statistics.median(partial_s), 3),
        "latest_after_the_timeout_ms": round(max(overtime) * 1e3, 2),
        "mean_step_ms": round(statistics.median(step_s) * 1e3, 2),
        "least_share_scored": round(min(shares), 3),
        "wrong": wrong,
    }


def _steps(engine: Engine) -> tuple[float, float]:
    """How many steps there have been, and their seconds."""
    (family,) = engine.metrics.step_seconds.collect()
    values = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    return values["count"], values["sum"]


def _wrong(whole: RerankResult, partial: RerankResult, documents: int) -> int:
    """How many results differ from those of the whole request, are out of order, or missing altogether."""
    scores = {result.index: result.score for result in whole.results}
    given = [(result.index, result.score) for result in partial.results]
    differing = sum(not np.isclose(score, scores[i], rtol=1e-4, atol=1e-5) for i, score in given)
    ranks = [score for _, score in given]
    out_of_order = sum(earlier < later for earlier, later in pairwise(ranks))
    listed = {i for i, _ in given} | set(partial.unscored)
    return differing + out_of_order + (documents - len(listed))
