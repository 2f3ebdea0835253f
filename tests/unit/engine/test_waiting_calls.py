"""Calls in process wait for room in the queue: all are served, and whoever gives up harms no other."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from maxsimd.engine import Engine, EngineConfig, Engines, Stage, Tenant, errors
from maxsimd.engine.metrics import EngineStats
from tests.engines import held_steps
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENTS = [f"the document with the number {i}" for i in range(20)]


@pytest.fixture(scope="module")
def config(bge: str) -> EngineConfig:
    return EngineConfig(
        model=bge, score_type="late-interaction", dtype="float32",
        max_batch_tokens=128, max_queued_tokens=1000, cache_mb=0, threads=1,
    )  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(config: EngineConfig) -> AsyncIterator[Engine]:
    async with Engine(config) as engine:
        yield engine


async def crowd(engine: Engine, calls: int) -> list["asyncio.Task[Any]"]:
    tasks = [asyncio.create_task(engine.score(f"query {i}", DOCUMENTS)) for i in range(calls)]
    await until(lambda: engine.stats().waiting_requests > calls // 2)
    read = engine.metrics.registry.get_sample_value
    await until(lambda: read("maxsimd_preparing_requests") == 0)  # no more of them get a permit
    return tasks


async def at_rest(engine: Engine) -> None:
    await until(lambda: engine.stats() == EngineStats())


async def test_more_calls_than_the_queue_holds_are_all_served(engine: Engine) -> None:
    calls = [engine.score(f"query {i % 7}", DOCUMENTS) for i in range(200)]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, engine.stats().waiting_tokens)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    results = await asyncio.gather(*calls)
    watching.cancel()
    for i, result in enumerate(results):
        assert result.scores == pytest.approx(results[i % 7].scores, abs=1e-5)
    assert 0 < most <= 1000
    await at_rest(engine)


async def test_a_number_of_seconds_refuses_as_a_server_does(config: EngineConfig) -> None:
    for seconds in (600.0, math.inf):
        async with Engine(replace(config, max_wait_seconds=seconds)) as engine:
            with held_steps(engine):
                calls = {asyncio.create_task(engine.score("query", DOCUMENTS)) for _ in range(30)}
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, errors.QueueFullError)]
        assert refused
        assert "max_queued_tokens" in str(refused[0])
    for seconds in (-1, math.nan):
        with pytest.raises(ValueError, match=r"^max_wait_seconds must be 0 or more, inf or None, not"):
            EngineConfig(max_wait_seconds=seconds)


async def test_a_timeout_counts_the_wait_for_a_permit(engine: Engine) -> None:
    with held_steps(engine) as go_on:
        calls = await crowd(engine, 20)
        waiting = engine.stats().waiting_requests
        late = (engine.score("late", DOCUMENTS, timeout=0.2, on_timeout=end) for end in ("error", "partial"))
        failed, partial = await asyncio.gather(*late, return_exceptions=True)
        assert isinstance(failed, errors.RequestTimeoutError)
        assert (partial.unscored, engine.stats().waiting_requests) == (tuple(range(20)), waiting)
        assert engine.metrics.registry.get_sample_value("maxsimd_waiting_requests") == waiting
        go_on.set()
        assert all(len(result.scores) == 20 for result in await asyncio.gather(*calls))
    await at_rest(engine)


async def test_a_progress_callback_may_start_calls(engine: Engine) -> None:
    started: list[asyncio.Task[Any]] = []

    def progress(done: int, total: int) -> None:
        if len(started) < 50:
            started.append(asyncio.create_task(engine.score("inner", DOCUMENTS)))

    async with asyncio.timeout(600):
        await asyncio.gather(*[engine.score("q", DOCUMENTS, progress=progress) for _ in range(20)])
        await asyncio.gather(*started)
    await at_rest(engine)


async def test_streams_windows_and_encoded_queries_wait_too(engine: Engine) -> None:
    async def stream(i: int) -> int:
        async with engine.stream(f"query {i}", DOCUMENTS) as stream:
            async for _ in stream:
                await engine.score("inside", DOCUMENTS[:5])
        return len(stream.result.scores)

    async def encoded(i: int) -> int:
        query = await engine.encode_query(f"query {i}")
        long = await engine.score(query, ["word " * 900] * 3, truncation="window")
        return len((await engine.rerank(query, DOCUMENTS)).results) + len(long.scores) - 3

    async with asyncio.timeout(600):
        found = await asyncio.gather(*[call(i) for i in range(15) for call in (stream, encoded)])
    assert found == [20] * 30
    await at_rest(engine)


@pytest.mark.parametrize("end", ["the engine was stopped", "the engine has died"])
async def test_a_stop_or_a_death_ends_all_waits_at_once(config: EngineConfig, end: str) -> None:
    engine = Engine(config)
    await engine.start()
    with held_steps(engine) as go_on:
        calls = await crowd(engine, 40)
        running: Any = engine._running
        ending = asyncio.create_task(engine.stop(grace=0.1) if "stopped" in end else engine.until_dead())
        if "died" in end:
            running.scheduler._account = None  # the next report of a step kills the actor
            go_on.set()
        answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 600)
        assert {type(answer) for answer in answers} == {errors.EngineDeadError}
        assert all(end in str(answer) for answer in answers)
        go_on.set()
        await ending
    await engine.start()
    assert len((await engine.score("query", DOCUMENTS)).scores) == 20
    await engine.stop()


async def test_a_stop_without_grace_lets_calls_that_wait_finish(config: EngineConfig) -> None:
    async with Engine(config) as engine:
        with held_steps(engine):
            calls = await crowd(engine, 40)
    assert all(len(result.scores) == 20 for result in await asyncio.gather(*calls))


async def test_models_share_a_device_and_wait(config: EngineConfig, bert_cross_encoder: str) -> None:
    second = EngineConfig(model=bert_cross_encoder, dtype="float32", threads=1, max_queued_tokens=1000)
    async with Engines({"first": config, "second": second}) as models, asyncio.timeout(600):
        stages = [Stage("first", keep=5), Stage("second")]
        cascades = [models.rerank(f"query {i}", DOCUMENTS, stages) for i in range(30)]
        calls = [models[name].score("query", DOCUMENTS) for name in ("first", "second") for _ in range(20)]
        for result in await asyncio.gather(*cascades, *calls):
            assert len(getattr(result, "results", DOCUMENTS[:5])) == 5


@pytest.mark.parametrize("seed", range(3))
async def test_calls_that_give_up_at_random_moments_harm_no_other(engine: Engine, seed: int) -> None:
    chance = random.Random(seed)
    engine.set_tenants({"slow": Tenant(weight=0.1), "small": Tenant(max_queued_tokens=300)})
    expected = (await engine.score("query", DOCUMENTS)).scores
    calls: list[tuple[asyncio.Task[Any], int, bool]] = []
    for _ in range(300):
        documents = chance.choice((1, 3, 9, 20))
        ways: dict[str, Any] = {"tenant": chance.choice(("", "slow", "small", "other"))}
        ways["priority"] = chance.choice(("interactive", "batch", -3))
        may_fail = chance.random() < 0.7
        if may_fail and chance.random() < 0.3:
            ways |= {"timeout": chance.choice((0.0001, 0.01, 0.1))}
            ways |= {"on_timeout": chance.choice(("error", "partial"))}
        call = asyncio.create_task(engine.score("query", DOCUMENTS[:documents], **ways))
        calls.append((call, documents, may_fail))
        if may_fail and "timeout" not in ways:
            if chance.random() < 0.5:
                asyncio.get_running_loop().call_later(chance.random(), call.cancel)
            else:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                call.cancel()
    async with asyncio.timeout(600):
        answers = await asyncio.gather(*[call for call, _, _ in calls], return_exceptions=True)
    for answer, (_, documents, may_fail) in zip(answers, calls, strict=True):
        if not may_fail or not isinstance(answer, asyncio.CancelledError | errors.RequestTimeoutError):
            done = [i for i in range(documents) if i not in answer.unscored]
            assert done == list(range(documents)) or may_fail
            assert [answer.scores[i] for i in done] == pytest.approx([expected[i] for i in done], abs=1e-5)
    await at_rest(engine)
    assert engine.is_healthy
    assert engine.metrics.registry.get_sample_value("maxsimd_preparing_tokens") == 0
    engine.set_tenants({})
