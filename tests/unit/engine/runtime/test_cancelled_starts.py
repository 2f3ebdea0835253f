"""Starts and stops that are cancelled or fail end what they began, and can be repeated."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from maxsimd.engine import Engine, EngineConfig, EngineNotReadyError, Engines, ModelLoadError
from maxsimd.engine import runtime as launch_module
from maxsimd.engine.checkpoint import stages
from maxsimd.engine.device import load as load_module
from maxsimd.engine.device import shared as shared_module
from maxsimd.engine.device.thread import DeviceThread
from tests.waiting import Pause, until


@pytest.fixture(scope="module")
def config(bge: str) -> EngineConfig:
    return EngineConfig(model=bge, dtype="float32", threads=1)


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("maxsimd-")}


async def cancelled(start: "asyncio.Task[Any]", pause: Pause) -> None:
    """Cancels a start when its load is at the pause, which then goes on."""
    await asyncio.to_thread(pause.is_there.wait, 60)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    pause.may_go_on.set()


async def test_cancelled_starts_end_at_a_stage(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before, engine = threads(), Engine(config)
    next_stage = load_module.next_stage
    for place in range(1, 8):
        pause, stages = Pause(), 0

        def stage(pause: Pause = pause, place: int = place) -> None:
            nonlocal stages
            stages += 1
            if stages == place:
                pause.here()
            next_stage()

        with monkeypatch.context() as patched:
            patched.setattr(load_module, "next_stage", stage)
            start = asyncio.create_task(engine.start())
            if place == 7:
                await start
                assert stages == 6
                break
            await cancelled(start, pause)
            await until(lambda: threads() == before)
            assert stages == place, "no stage was begun after it"
    assert (await engine.embed("text")).embeddings.shape == (1, 128)
    await engine.stop()
    assert threads() == before


@pytest.mark.parametrize("kind", ["alone", "among several"])
async def test_late_cancels_free_it(config: EngineConfig, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    before, pause = threads(), Pause()
    module = launch_module if kind == "alone" else shared_module
    load: Any = module.load_device_model

    def load_and_pause(*arguments: Any) -> Any:
        loaded = load(*arguments)
        pause.here()
        return loaded

    with monkeypatch.context() as patched:
        patched.setattr(module, "load_device_model", load_and_pause)
        engine: Any = Engine(config) if kind == "alone" else Engines({"a": config})
        await cancelled(asyncio.create_task(engine.start()), pause)
        if kind == "among several":
            await engine.stop()
    await until(lambda: threads() == before)


async def test_cancelled_starts_load_in_turns(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before, engine, loading, at_a_time = threads(), Engine(config), [], []
    load = launch_module.load_device_model

    def count(config: EngineConfig) -> Any:
        loading.append(config)
        at_a_time.append(len(loading))
        try:
            return load(config)
        finally:
            loading.pop()

    monkeypatch.setattr(launch_module, "load_device_model", count)
    for i in range(12):
        with suppress(TimeoutError):
            await asyncio.wait_for(engine.start(), 0.02 * i)
            await engine.stop()
    assert set(at_a_time) == {1}
    async with engine:
        assert (await engine.embed("text")).embeddings.shape == (1, 128)
    assert threads() == before


async def test_a_failed_start_closes_its_cache(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before, engine = threads(), Engine(config)
    with monkeypatch.context() as patched:
        patched.setattr(load_module, "prepare", Mock(side_effect=ModelLoadError("it cannot be prepared")))
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="cannot be prepared"):
                await engine.start()
    monkeypatch.setattr(Engine, "_launch", AsyncMock(side_effect=asyncio.CancelledError))
    with pytest.raises(ModelLoadError, match="cancelled from inside"):
        await engine.start()
    assert threads() == before


async def test_a_stop_ends_a_running_start(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before, engine, pause = threads(), Engine(config), Pause()
    monkeypatch.setattr(load_module, "next_stage", pause.here)
    start = asyncio.create_task(engine.start())
    await asyncio.to_thread(pause.is_there.wait, 60)
    await engine.stop()
    pause.may_go_on.set()
    with pytest.raises(EngineNotReadyError, match="was stopped"):
        await start
    await until(lambda: threads() == before)
    async with engine:
        assert (await engine.embed("text")).embeddings.shape == (1, 128)


async def test_a_stuck_load_holds_up_no_other(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before, pause = threads(), Pause()
    monkeypatch.setattr(stages, "GIVEN_UP_SECONDS", 0.2)
    async with Engines({}) as engines:
        with monkeypatch.context() as patched:
            patched.setattr(load_module, "next_stage", pause.here)
            stuck = asyncio.create_task(engines.load("a", config))
            await asyncio.to_thread(pause.is_there.wait, 60)
            stuck.cancel()
            await asyncio.wait({stuck})
        try:
            with pytest.raises(ModelLoadError, match="given up and is stuck"):
                await asyncio.wait_for(engines.load("b", config), 600)
        finally:
            pause.may_go_on.set()
        await until(lambda: load_module.num_given_up() == 0)
        await engines.load("c", config)
    await until(lambda: threads() == before)


def test_a_load_that_waits_fails_only_behind_a_stuck_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "GIVEN_UP_SECONDS", 0.0)
    monkeypatch.setattr(stages, "_LOOK_SECONDS", 0.001)
    holder, waiter, other = (stages.StagedLoad() for _ in range(3))
    holds, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with holder.on_this_thread(), stages.LOADING:
            holds.set()
            may_end.wait(1200)

    def load() -> None:
        with waiter.on_this_thread(), stages.LOADING:
            pass

    with ThreadPoolExecutor(2) as pool:
        holding = pool.submit(hold)
        try:
            assert holds.wait(600)
            other.give_up()
            waiting = pool.submit(load)
            assert not wait({waiting}, 0.05).done, "another load that was given up does not count"
            waiter.give_up()
            with pytest.raises(stages.LoadGivenUpError):
                waiting.result(600)
            holder.give_up()
            waiter = stages.StagedLoad()
            with pytest.raises(ModelLoadError, match="given up and is stuck"):
                pool.submit(load).result(600)
        finally:
            may_end.set()
        holding.result(600)
        pool.submit(load).result(600)


def test_a_load_that_was_given_up_before_it_began_holds_up_nobody() -> None:
    """It waits for a thread that is stuck with another model's step."""
    thread, may_end = DeviceThread(), threading.Event()
    thread.loop.call_soon_threadsafe(may_end.wait, 60)
    load = load_module.ModelLoad(pytest.fail, thread, shares_thread=True)
    try:
        load.give_up()
        assert load_module.num_given_up() == 0
        with pytest.raises(stages.LoadGivenUpError):
            load.run()
    finally:
        may_end.set()
        thread.close()


@pytest.mark.parametrize(
    "end", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), CancelledError()]
)
@pytest.mark.parametrize("kind", ["alone", "among several"])
async def test_a_model_whose_code_ends_its_load_fails_alone(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, kind: str, end: BaseException
) -> None:
    def load(*_: Any) -> Any:
        with stages.LOADING:
            raise end

    before, module = threads(), launch_module if kind == "alone" else shared_module
    with monkeypatch.context() as patched:
        patched.setattr(module, "load_device_model", load)
        engine = Engine(config)
        async with Engines({}) as engines:
            with pytest.raises(ModelLoadError, match=f"ended by {type(end).__name__}") as raised:
                await (engine.start() if kind == "alone" else engines.load("a", config))
            assert raised.value.__cause__ is end
            with stages.LOADING:
                pass
    assert threads() == before


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_process_ends_while_a_model_loads(is_given_up: bool) -> None:
    """The load is inside of one stage that never ends."""
    program = f"""
import asyncio, sys, threading, torch
from maxsimd.engine import Engine, EngineConfig, runtime

begun = threading.Event()

def load(*_):
    begun.set()
    matrix = torch.ones(300, 300)
    while True:
        matrix @ matrix

runtime.load_device_model = load

async def start():
    starting = asyncio.create_task(Engine(EngineConfig()).start())
    await asyncio.to_thread(begun.wait)
    if not {is_given_up}:
        await starting
    starting.cancel()
    await asyncio.wait([starting])

threading.Thread(target=asyncio.run, args=(start(),), daemon=not {is_given_up}).start()
begun.wait()
sys.exit(3)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 3, ended.stderr
    assert "terminate called" not in ended.stderr
    assert "Fatal Python error" not in ended.stderr


def test_a_stop_that_the_end_of_the_event_loop_cancels_ends_the_threads(config: EngineConfig) -> None:
    before = threads()

    async def stop_halfway(turns: int) -> bool:
        engine = Engine(config)
        await engine.start()
        stop = asyncio.create_task(engine.stop())
        for _ in range(turns):
            await asyncio.sleep(0)
        return not stop.done()

    for turns in range(1, 7):
        was_cancelled = asyncio.run(stop_halfway(turns))
        assert threads() == before, turns
        assert was_cancelled or turns > 1
