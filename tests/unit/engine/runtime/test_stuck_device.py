"""An engine whose device is stuck: it dies at once, leaves the thread behind, and starts again beside it."""

import asyncio
import logging
import math
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from maxsimd.engine import Engine, EngineConfig, EngineDeadError
from maxsimd.engine import runtime as launch_module
from maxsimd.engine.actors.runner import RunnerActor
from maxsimd.engine.actors.scheduler import StuckDeviceError, Watchdog
from maxsimd.engine.actors.turns import Turns
from maxsimd.engine.device.load import num_given_up
from maxsimd.engine.device.thread import num_left_behind
from maxsimd.engine.scoring import scorer as scoring_module
from maxsimd.scheduler import StepTimes
from tests.waiting import Pause, until, wait_for

DOCUMENTS = ["Paris is the capital of France.", "Berlin is in Germany."]


class Sticking(Pause):
    def stick(self, engine: Engine) -> None:
        runner: Any = engine.device_model.runner
        runner.forward = self.before(runner.forward)


@pytest.fixture
def sticking() -> Iterator[Sticking]:
    sticking = Sticking()
    yield sticking
    sticking.may_go_on.set()
    wait_for(lambda: num_left_behind() + num_given_up() == 0)


@pytest.fixture
def config(stanford_colbert: str) -> EngineConfig:
    return EngineConfig(model=stanford_colbert, dtype="float32", threads=1, step_timeout_seconds=0.5)


async def _score(engine: Engine) -> list[float]:
    async with asyncio.timeout(600):
        return (await engine.score("capital of France", DOCUMENTS, cache="bypass")).scores


def _device_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("maxsimd-device")


async def test_a_stuck_engine_says_so_and_starts_again_once(
    sticking: Sticking, config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(config) as engine:
        right = await _score(engine)
        sticking.stick(engine)
        told = await asyncio.gather(*(_score(engine) for _ in range(3)), return_exceptions=True)
        assert ([type(one) for one in told], engine.is_healthy) == ([EngineDeadError] * 3, False)
        assert engine.death is not None
        assert "a step has made no progress for" in engine.death
        with pytest.raises(EngineDeadError):
            await _score(engine)
        (line,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
        assert line.exc_info is not None
        cause: Any = line.exc_info[1]
        assert all(part in cause.__notes__[0] for part in ("maxsimd-device:", "in here")), cause.__notes__[0]
        assert engine.restart_obstacle is None
        await engine.start()
        assert (num_left_behind(), engine.is_healthy) == (1, True)
        assert (engine.death, await _score(engine)) == (None, right)
        assert engine.metrics.registry.get_sample_value("maxsimd_engine_restarts_total") == 1
        sticking.stick(engine)
        with pytest.raises(EngineDeadError):
            await _score(engine)
        again = "the device is stuck again, and the thread that was stuck before"
        assert str(engine.restart_obstacle).startswith(again)
        sticking.may_go_on.set()
        await until(lambda: num_left_behind() == 0)


async def test_numbers_that_never_arrive_end_the_engine_too(
    sticking: Sticking, monkeypatch: pytest.MonkeyPatch, config: EngineConfig
) -> None:
    never = SimpleNamespace(synchronize=sticking.here)
    async with Engine(config) as engine:
        right = await _score(engine)
        with monkeypatch.context() as patched:
            patched.setattr(scoring_module, "record_arrival", lambda device: never)
            with pytest.raises(EngineDeadError):
                await _score(engine)
        await engine.start()
        assert await _score(engine) == right


async def test_a_stop_with_a_stuck_step_ends_all_the_same(sticking: Sticking, config: EngineConfig) -> None:
    async with Engine(config) as engine:
        await _score(engine)
        sticking.stick(engine)
        asked = asyncio.create_task(_score(engine))
        await asyncio.to_thread(sticking.is_there.wait)
        async with asyncio.timeout(600):
            await engine.stop(grace=0)
        assert num_left_behind() == 1
        with pytest.raises(EngineDeadError):
            await asked


async def test_the_dead_are_freed_before_loads(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    # pytest keeps what is logged, and with it the frames of the error.
    monkeypatch.setattr(launch_module.log, "critical", lambda *_, **__: None)
    async with Engine(config) as engine:
        old = weakref.ref(engine.device_model.model.backbone)
        devices = _device_threads()
        with monkeypatch.context() as broken:
            broken.setattr(RunnerActor, "_finish", Mock(side_effect=RuntimeError("beyond repair")))
            with pytest.raises(EngineDeadError):
                await _score(engine)
        load, found = launch_module.load_device_model, []
        noting = lambda given: found.append(old()) or load(given)  # noqa: E731
        monkeypatch.setattr(launch_module, "load_device_model", noting)
        await engine.start()
        assert (found, engine.is_healthy, engine.death, _device_threads()) == ([None], True, None, devices)
        assert await _score(engine)


async def test_a_start_that_is_stuck_can_be_given_up(sticking: Any, monkeypatch: Any, config: Any) -> None:
    engine = Engine(config)
    with monkeypatch.context() as stuck:
        stuck.setattr(launch_module, "load_device_model", sticking.here)
        start = asyncio.create_task(engine.start())
        await asyncio.to_thread(sticking.is_there.wait)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        # The device is not taken for stuck: after it, a step that is does not end the engine for good.
        assert (num_given_up(), num_left_behind()) == (1, 0)
    monkeypatch.setattr("maxsimd.engine.checkpoint.stages.GIVEN_UP_SECONDS", 0.1)
    await engine.start()
    assert await _score(engine)
    await engine.stop()


async def test_restarts_find_the_disk_cache(sticking: Sticking, tmp_path: Path, config: EngineConfig) -> None:
    async with Engine(replace(config, cache_dir=str(tmp_path))) as engine:
        first = await engine.score("capital of France", DOCUMENTS)
        sticking.stick(engine)
        with pytest.raises(EngineDeadError):
            await _score(engine)
        await engine.start()
        second = await engine.score("capital of France", DOCUMENTS)
        assert second.scores == first.scores
        assert second.usage.cached_tokens > 0
        await engine.score("capital of France", ["a third"])
    with sqlite3.connect(tmp_path / "maxsimd-embeddings.sqlite3", timeout=20) as connection:
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (3,)


@pytest.fixture
def steps() -> Any:
    times = StepTimes()
    times.observe(100, 0.01)
    return SimpleNamespace(in_flight=1, running_work=100, num_signs=0, step_times=times)


def _ticks_until_stuck(watchdog: Watchdog, most: int) -> int | None:
    for tick in range(1, most + 1):
        try:
            watchdog.tick(1.0)
        except StuckDeviceError:
            return tick
    return None


def test_a_device_is_stuck_after_the_timeout_without_a_sign(steps: Any) -> None:
    watchdog = Watchdog(3, steps, lambda: "where it stands")
    for _ in range(10):
        assert _ticks_until_stuck(watchdog, 2) is None
        steps.num_signs += 1
    steps.in_flight = 0
    assert _ticks_until_stuck(watchdog, 100) is None
    steps.in_flight = 1
    assert _ticks_until_stuck(watchdog, 2) is None
    with pytest.raises(StuckDeviceError, match="no progress for 3 seconds") as stuck:
        watchdog.tick(1.0)
    assert stuck.value.__notes__ == ["where it stands"]
    turns = Turns()
    own, another = turns.join(1.0), turns.join(1.0)
    watchdog = Watchdog(3, steps, str, own)
    turns.holder = another
    assert _ticks_until_stuck(watchdog, 100) is None
    turns.holder = own
    assert _ticks_until_stuck(watchdog, 9) == 3


async def test_large_steps_may_take_longer_and_all_without_a_timeout(steps: Any) -> None:
    """Ten times the timeout before a step was seen, and 20 times what is expected of a slow device."""
    steps.step_times = StepTimes()
    assert Watchdog(3, steps, str).allowance == 30
    steps.step_times.observe(10, 1.0)
    for work, expected in ((100, 10.0), (10, 1.0), (0, 1.0)):
        steps.running_work = work
        assert Watchdog(3, steps, str).allowance == 20 * expected
    watchdog = Watchdog(0, steps, str)
    assert watchdog.allowance == math.inf
    async with asyncio.timeout(600):
        await watchdog.run()


def test_the_latest_steps_say_how_long_another_takes_at_most() -> None:
    times = StepTimes()
    assert times.most_seconds(10) is None
    times.observe(10, 2.0)
    assert times.most_seconds(10) == times.most_seconds(1) == 2.0
    assert times.most_seconds(30) == 6.0
    times.observe(1, 0.5)
    assert (times.most_seconds(1), times.most_seconds(30)) == (0.5, 6.0)
    for _ in range(16):
        times.observe(5, 5.0)
    assert times.most_seconds(30) == 30.0, "earlier ones are forgotten"
