"""Several models share what one device has: its time by weight, its thread, memory for caches, a registry."""

import asyncio
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from maxsimd.api.garbage import resident_bytes
from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig, EngineDeadError, Engines, ModelFailedError, ModelLoadError
from maxsimd.engine.device.allocators import give_back_memory
from maxsimd.engine.device.thread import num_left_behind
from tests.waiting import until, wait_for


async def test_time_on_the_device_goes_by_weight_and_is_counted(config: EngineConfig) -> None:
    """How turns divide time by their weights is in actors/test_turns.py."""
    async with Engines({"a": config, "b": config}, weights={"a": 3.0}) as engines:
        for name, weight in (("a", 3.0), ("b", 1.0)):
            assert engines[name]._running._device.turn.weight == weight  # type: ignore[union-attr]
            await engines[name].score("a", ["b"])
            assert engines.device_seconds(name) > 0
            counted = engines.registry.get_sample_value("maxsimd_device_seconds_total", {"model": name})
            assert counted == pytest.approx(engines.device_seconds(name))


async def test_no_step_runs_while_a_load_reads_cancelled_or_not(
    held_load: tuple[threading.Event, threading.Event], config: EngineConfig
) -> None:
    """Reading one changes torch's default precision for all threads."""
    is_read, go_on = held_load
    go_on.set()
    async with Engines({"a": config}) as engines:
        is_read.clear()
        go_on.clear()
        loading = asyncio.create_task(engines.load("b", config))
        await asyncio.to_thread(is_read.wait)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        score = asyncio.create_task(engines["a"].score("a", ["b"], cache="bypass"))
        await asyncio.wait({score}, timeout=0.2)
        assert not score.done()
        go_on.set()
        assert (await score).scores


async def test_caches_share_what_one_would_take(config: EngineConfig) -> None:
    def limits(engines: Engines) -> list[int]:
        return [engines[name].metrics.cache._memory.limit >> 20 for name in engines.names]  # type: ignore[union-attr]

    async with Engines({"a": config, "own": replace(config, cache_mb=7)}) as engines:
        whole = limits(engines)[0]
        assert limits(engines) == [whole, 7]
        await engines.load("b", config)
        assert limits(engines) == [whole // 2, 7, whole // 2]
        await engines.drop("a")
        assert limits(engines) == [7, whole]


async def test_another_number_of_threads_is_refused_and_said(config: EngineConfig) -> None:
    async with Engines({"a": config}) as engines:
        with pytest.raises(ModelLoadError, match="threads is 1 for those that are there, and 2 for this one"):
            await engines.load("b", replace(config, threads=2))
        await engines.drop("a")
        await engines.load("b", replace(config, threads=2))
        assert (await engines["b"].score("a", ["b"])).scores


def _breaking(engines: Engines, name: str, act: Callable[[], Any]) -> None:
    """Has the model's next step do this in place of running."""
    runner: Any = engines[name].device_model.prepared.runner
    runner.forward = lambda step: act()


async def test_an_exit_in_one_models_code_ends_that_model_alone(config: EngineConfig) -> None:
    def leave() -> None:
        raise SystemExit(3)

    async with Engines({"a": config, "b": config}) as engines:
        right = (await engines["a"].score("a", ["b"])).scores
        _breaking(engines, "b", leave)
        with pytest.raises(EngineDeadError, match="ended by SystemExit"):
            await engines["b"].score("a", ["b"])
        assert (await engines["a"].score("a", ["b"], cache="bypass")).scores == right
        await until(lambda: engines.state("b").startswith("failed"))


async def test_a_step_that_never_ends_fails_all_models_of_its_device(config: EngineConfig) -> None:
    reached, released = threading.Event(), threading.Event()

    def stick() -> None:
        reached.set()
        released.wait()

    impatient = replace(config, step_timeout_seconds=0.5)
    async with Engines({"a": impatient, "b": impatient}) as engines:
        right = (await engines["a"].score("a", ["b"])).scores
        await engines["b"].score("a", ["b"])
        _breaking(engines, "b", stick)
        try:
            asked = [asyncio.create_task(engines["b"].score("a", ["c"], cache="bypass")) for _ in range(2)]
            await asyncio.to_thread(reached.wait)
            asked.append(asyncio.create_task(engines["a"].score("a", ["c"], cache="bypass")))
            async with asyncio.timeout(60):
                answers = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(answer) for answer in answers] == [EngineDeadError] * 3
            await until(lambda: all(engines.state(name).startswith("failed") for name in "ab"))
            with pytest.raises(ModelFailedError, match="stuck with a step of another model"):
                _ = engines["a"]
            await engines.load("a", config)
            assert (await engines["a"].score("a", ["b"])).scores == right
        finally:
            released.set()
    wait_for(lambda: num_left_behind() == 0)


@pytest.mark.parametrize("cycles", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
async def test_loads_and_drops_lose_no_request_and_free_memory(
    cycles: int, pairs: list[Pair], config: EngineConfig
) -> None:
    documents = [pair.document for pair in pairs[:5]]

    def resident() -> int:
        gc.collect()
        give_back_memory()
        return resident_bytes()

    answered = 0

    async def ask(engines: Engines) -> None:
        nonlocal answered
        while True:
            await engines["stays"].score(pairs[answered % 40].query, documents, cache="bypass")
            answered += 1

    async with Engines({"stays": config}) as engines:
        traffic = asyncio.create_task(ask(engines))
        for cycle in range(cycles):
            await engines.load("comes", config)
            comes = engines["comes"]
            own = [asyncio.create_task(comes.score(pair.query, documents)) for pair in pairs[:4]]
            await asyncio.sleep(0)  # they are in
            await engines.drop("comes", grace=None)
            assert all(len(result.scores) == len(documents) for result in await asyncio.gather(*own))
            del comes, own
            if cycle == 0:  # what libraries keep for ever is there by now
                before, begun = resident(), answered
        await until(lambda: answered > begun)
        assert resident() == pytest.approx(before, rel=0.03)
        assert not traffic.done()
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)
