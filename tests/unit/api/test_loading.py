"""When a server takes work, and what becomes of an engine that has died."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from maxsimd.api import serve as loading_module
from maxsimd.api.config import ServerConfig
from maxsimd.api.serve import EngineDeaths, Loading
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine, EngineDeadError, EngineNotReadyError, ModelLoadError
from tests.waiting import Clock


def test_pauses_double_and_a_death_counts_for_ten_minutes() -> None:
    clock = Clock()
    deaths = EngineDeaths(clock)
    assert [deaths.note() for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, None]
    deaths = EngineDeaths(clock)
    for _ in range(20):
        assert deaths.note() in (1.0, 2.0, 4.0, 8.0)
        clock.now += 150.0
    clock.now += 600.0
    assert deaths.note() == 1.0


class Signals:
    is_signaled = False

    async def signaled(self) -> None:
        while not self.is_signaled:
            await asyncio.sleep(0.001)

    async def signaled_within(self, seconds: float) -> bool:
        return self.is_signaled


class Starting(Engine):
    """An engine without a model: each start does what the next of `starts` does."""

    def __init__(self, *starts: Callable[[], Any]) -> None:
        super().__init__()
        self.starts = list(starts)
        self.death = "of old age"

    async def start(self) -> None:
        made = self.starts.pop(0)()
        if made is not None:
            await made
        self.death = None


def _fail() -> None:
    raise ModelLoadError("the model is gone")


def _never() -> Any:
    return asyncio.Event().wait()


def _set_up(*starts: Callable[[], Any]) -> tuple[Starting, Any, ServerState, Loading]:
    engine, stop = Starting(*starts), Signals()
    state = ServerState(engine, ServerConfig(restart_on_failure=True))
    return engine, stop, state, Loading(engine, stop, EngineDeaths())  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_module, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(loading_module, "_LEAST_LOAD_SECONDS", 0.1)


async def test_an_engine_is_started_until_it_runs_or_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    engine, _, state, loading = _set_up(_fail, _fail, lambda: None)
    assert state.phase == "restarting"
    assert (await loading.again(state), engine.starts, state.comes_back) == (True, [], True)
    for starts, obstacle, message in (
        ([_fail] * 4, None, "it died 5 times in 10 minutes"),
        ([], "the GPU is lost", "the engine is not started again: the GPU is lost"),
    ):
        engine, _, state, loading = _set_up(*starts)
        engine.restart_obstacle = obstacle
        assert (await loading.again(state), state.phase) == (False, "dead")
        assert message in caplog.text
    _, _, state, loading = _set_up(lambda: None, _never)
    assert await loading.first()
    async with asyncio.timeout(600):
        assert not await loading.again(state)
    assert (state.comes_back, "loading its model takes longer than" in caplog.text) == (False, True)


async def test_a_signal_ends_it_and_the_server_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    for comes_before in (True, False):
        _, stop, state, loading = _set_up(_never)
        stop.is_signaled = comes_before
        restarting = asyncio.create_task(loading.again(state))
        await asyncio.sleep(0.02)
        stop.is_signaled = True
        async with asyncio.timeout(600):
            assert not await restarting
        assert state.comes_back
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


class Standing(Engine):
    is_healthy = False
    death: Any = None


def test_work_is_taken_only_while_all_is_well() -> None:
    for death, draining, healthy, restarts, phase, refusal in (
        (None, False, False, False, "starting", EngineNotReadyError),
        (None, False, True, False, "ok", None),
        (None, True, True, False, "draining", EngineNotReadyError),
        (None, True, False, False, "draining", EngineNotReadyError),
        ("of old age", False, True, False, "dead", EngineDeadError),
        ("of old age", True, False, False, "dead", EngineDeadError),
        (None, False, True, True, "ok", None),
        ("of old age", False, False, True, "restarting", None),
        ("of old age", True, False, True, "draining", None),
    ):
        state: Any = ServerState(Standing(), ServerConfig(restart_on_failure=restarts))
        assert state.closing is False
        state.engine.death, state.engine.is_healthy, state.closing = death, healthy, draining
        assert (state.phase, state.is_ready) == (phase, phase == "ok")
        if phase == "ok":
            state.check_ready()
        elif refusal is not None:
            message = "the server is starting or shutting down" if death is None else death
            with pytest.raises(refusal, match=f"^{message}$"):
                state.check_ready()
        state.comes_back = False
        assert state.phase == ("dead" if death else phase)


async def test_requests_are_ended_once_and_timeouts_stay_timeouts() -> None:
    state = ServerState(Standing(), ServerConfig())

    async def wait() -> None:
        async with state.in_flight():
            await asyncio.sleep(3600)

    waiting = [asyncio.create_task(wait()) for _ in range(3)]
    quiet = asyncio.create_task(state.until_quiet())
    await asyncio.sleep(0)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.pop(0)
    assert not quiet.done(), "others are in flight"
    assert state.end_requests() == 2
    for task in waiting:
        with pytest.raises(EngineNotReadyError, match="shutting down"):
            await task
    await asyncio.wait_for(quiet, 600)
    assert state.end_requests() == 0
    with pytest.raises(TimeoutError):
        async with state.in_flight():
            raise TimeoutError
