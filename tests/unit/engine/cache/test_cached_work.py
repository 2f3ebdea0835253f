"""Documents whose embeddings are cached are work like any other: priced, limited, scheduled, cancelled."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, QueueFullError
from maxsimd.engine.preprocess import two_stage
from maxsimd.engine.stats import EngineStats
from maxsimd.scheduler import Step
from tests.waiting import until

NUM_DOCUMENTS = 120


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    texts = [" ".join(pair.document.split()[:10]) for pair in pairs]
    return list(dict.fromkeys(texts))[:NUM_DOCUMENTS]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that these documents are many batches."""
    monkeypatch.setattr(two_stage, "ON_HOST", two_stage.BatchLimits(rows=64, documents=512))
    monkeypatch.setattr(two_stage, "ROWS_PER_TOKEN", 2)


@pytest_asyncio.fixture
async def engine(stanford_colbert: str, documents: list[str], small_batches: None) -> AsyncIterator[Engine]:
    """An engine that takes few tokens into its queue and into a step, with all documents cached."""
    config = EngineConfig(
        model=stanford_colbert, dtype="float32", max_batch_tokens=64, max_queued_tokens=4000
    )
    async with Engine(config) as engine:
        for start in range(0, NUM_DOCUMENTS, 20):
            await engine.score("warm up", documents[start : start + 20], truncation=CUT_LONG)
        assert engine.device_model.cache is not None
        engine.device_model.cache.flush()
        yield engine


async def _until_tokens_wait(engine: Engine, num_tokens: int) -> None:
    """Returns as soon as more tokens wait; such requests are done within milliseconds."""
    async with asyncio.timeout(20):
        while engine.stats().waiting_tokens <= num_tokens:
            await asyncio.sleep(0)


async def test_cached_documents_score_as_new_ones_in_any_number_of_batches(
    engine: Engine, documents: list[str]
) -> None:
    cached = await engine.score("how is a file read", documents, truncation=CUT_LONG)
    steps_before = engine.metrics.registry.get_sample_value("maxsimd_step_seconds_count")
    again = await engine.score("how is a file read", documents, truncation=CUT_LONG)
    steps = engine.metrics.registry.get_sample_value("maxsimd_step_seconds_count")
    assert steps is not None
    assert steps_before is not None
    assert steps - steps_before > 5, "they were scored in parts, one step each"
    new = await engine.score("how is a file read", documents, truncation=CUT_LONG, cache="bypass")
    assert cached.usage.cached_documents == NUM_DOCUMENTS
    assert new.usage.cached_documents == 0
    np.testing.assert_allclose(cached.scores, new.scores, atol=1e-4)
    assert again.scores == cached.scores


async def test_the_queue_limit_counts_cached_documents_at_their_price(
    engine: Engine, documents: list[str]
) -> None:
    crowd = [
        asyncio.create_task(engine.score(f"query {i}", documents, truncation=CUT_LONG)) for i in range(20)
    ]
    answers = await asyncio.gather(*crowd, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, QueueFullError)]
    served = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert refused
    assert served
    assert len(refused) + len(served) == len(crowd)
    await until(lambda: engine.stats() == EngineStats())


async def test_a_small_request_passes_a_crowd_of_cached_ones(engine: Engine, documents: list[str]) -> None:
    go = threading.Event()
    runner: Any = engine.device_model.prepared.runner
    forward = runner.forward

    def wait_and_forward(step: Step) -> Any:
        assert go.wait(20)
        return forward(step)

    runner.forward = wait_and_forward
    done: list[str] = []

    async def score(name: str, query: str, texts: list[str]) -> None:
        await engine.score(query, texts, truncation=CUT_LONG)
        done.append(name)

    crowd = [asyncio.create_task(score("large", f"query {i}", documents)) for i in range(3)]
    await until(lambda: engine.stats().open_requests == 3)
    small = asyncio.create_task(score("small", "a", ["one line"]))
    await until(lambda: engine.stats().open_requests == 4)
    go.set()
    await asyncio.gather(small, *crowd)
    assert done == ["small", "large", "large", "large"]


async def test_cancelled_cached_documents_leave_the_queue_and_the_device(
    engine: Engine, documents: list[str]
) -> None:
    task = asyncio.create_task(engine.score("a query", documents, truncation=CUT_LONG))
    await _until_tokens_wait(engine, 0)
    async with asyncio.timeout(20):
        while engine.stats().waiting_cached == 0:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.stats() == EngineStats())
