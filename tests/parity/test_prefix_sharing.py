"""What stands before the documents of a query is run once, and the scores are the same."""

import asyncio

import numpy as np
import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, WINDOW_LONG, Engine, EngineConfig
from tests.checkpoints import cross_encoders, language_models
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.selection import with_default
from tests.waiting import until

QUERY = "How is a file opened for reading, and what is returned when there is none of that name?"


BUILDS = [
    language_models.qwen3_reranker,
    language_models.mxbai_rerank_v2,
    language_models.bge_reranker_v2_gemma,
    cross_encoders.llama,
    cross_encoders.qwen2,
]


@pytest.fixture(scope="module", params=with_default(BUILDS, [BUILDS[0]]))
def checkpoint(request: pytest.FixtureRequest, checkpoints: SharedCheckpoints) -> str:
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    return [pair.document[:300] for pair in pairs[:12]]


async def _run(
    checkpoint: str, documents: list[str], sharing: str, budget: int = 2048
) -> tuple[np.ndarray, int]:
    config = EngineConfig(model=checkpoint, dtype="float32", prefix_sharing=sharing, max_batch_tokens=budget)
    async with Engine(config) as engine:
        result = await engine.score(QUERY, documents, truncation=CUT_LONG, use_activation=False)
        # The last pair's results are there just before its prefix goes.
        await until(lambda: engine.stats().device.prefill_kv == 0)
        return np.array(result.scores), result.usage.cached_tokens


async def test_scores_with_and_without_sharing_are_equal(checkpoint: str, documents: list[str]) -> None:
    """Also where the prefix or a pair is cut between steps."""
    apart, none = await _run(checkpoint, documents, "off")
    assert none == 0
    for budget in (37, 2048):
        shared, saved = await _run(checkpoint, documents, "auto", budget)
        # Logits: float32 knows them to so many parts of their own size.
        np.testing.assert_allclose(shared, apart, atol=1e-5 * max(1.0, np.abs(apart).max()), rtol=0)
        assert saved > 8 * (len(documents) - 1)


async def test_a_request_that_is_cancelled_leaves_no_prefix_behind(
    checkpoint: str, documents: list[str]
) -> None:
    async with Engine(EngineConfig(model=checkpoint, dtype="float32", max_batch_tokens=200)) as engine:
        for delay in (0, 0.005, 0.05):
            task = asyncio.create_task(engine.score(QUERY, documents, truncation=CUT_LONG))
            await until(lambda: engine.stats().device.prefill_kv > 0)
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await engine.score("a", ["b", "c"])
        # The last pair's results are there just before its prefix goes.
        await until(lambda: engine.stats().device.prefill_kv == 0)


async def test_windows_share_their_prefix_too(checkpoint: str, documents: list[str]) -> None:
    long = [" ".join(documents[i : i + 6]) for i in range(0, 12, 6)]
    results = []
    for sharing in ("auto", "off"):
        config = EngineConfig(
            model=checkpoint, dtype="float32", prefix_sharing=sharing, max_model_len=400, window_overlap=10
        )
        async with Engine(config) as engine:
            results.append(await engine.score(QUERY, long, truncation=WINDOW_LONG))
    shared, apart = results
    np.testing.assert_allclose(shared.scores, apart.scores, atol=1e-5, rtol=1e-5)
    assert shared.usage.cached_tokens > 8 * len(long)
    assert apart.usage.cached_tokens == 0
