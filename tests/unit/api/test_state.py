"""What all handlers share: names, limits, phases, and when nothing is in flight."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from maxsimd.api.config import ServerConfig
from maxsimd.api.failures import ApiError
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine, EngineDeadError, EngineNotReadyError


class Standing(Engine):
    """An engine that says how it is, without a model of its own."""

    is_healthy = False
    death: Any = None
    facts: Any = type("Facts", (), {"name": "its own"})


def _state(**options: Any) -> Any:
    return ServerState(Standing(), ServerConfig(**options))


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
        state = _state(restart_on_failure=restarts)
        assert state.draining is False
        state.engine.death, state.engine.is_healthy, state.draining = death, healthy, draining
        assert state.phase == phase
        assert state.is_ready is (phase == "ok")
        if phase == "ok":
            state.check_ready()
        elif refusal is not None:
            message = "the server is starting or shutting down" if death is None else death
            with pytest.raises(refusal, match=f"^{message}$"):
                state.check_ready()
        state.comes_back = False
        assert state.phase == ("dead" if death else phase)


def test_a_model_goes_by_the_served_name_and_its_own() -> None:
    assert _state().model_name == "its own"
    state = _state(served_model_name=("mine",))
    assert state.model_name == "mine"
    for name in ("mine", "its own", "", None):
        state.check_model(name)
    with pytest.raises(ApiError) as refused:
        state.check_model("nope")
    error = refused.value
    assert str(error) == "The model `nope` does not exist; served here: `mine`."
    assert (error.status, error.kind, error.param, error.retry_after) == (404, "NotFoundError", "model", None)


async def test_it_is_quiet_when_no_request_is_in_flight() -> None:
    state = _state()

    def in_flight() -> Any:
        return state.engine.metrics.registry.get_sample_value("maxsimd_http_in_flight")

    await asyncio.wait_for(state.until_quiet(), 1)
    for _ in range(2):
        first, second = AsyncExitStack(), AsyncExitStack()
        await first.enter_async_context(state.in_flight())
        await second.enter_async_context(state.in_flight())
        quiet = asyncio.create_task(state.until_quiet())
        await asyncio.sleep(0)
        assert (in_flight(), quiet.done()) == (2, False)
        await first.aclose()
        await asyncio.sleep(0)
        assert (in_flight(), quiet.done()) == (1, False)
        with pytest.raises(RuntimeError):
            async with second:  # a request that fails has ended too
                raise RuntimeError
        await asyncio.wait_for(quiet, 1)
        assert in_flight() == 0


async def test_requests_are_ended_once_and_timeouts_stay_timeouts() -> None:
    state = _state()

    async def wait() -> None:
        async with state.in_flight():
            await asyncio.sleep(60)

    waiting = [asyncio.create_task(wait()) for _ in range(2)]
    await asyncio.sleep(0)
    assert state.end_requests() == 2
    for task in waiting:
        with pytest.raises(EngineNotReadyError, match="shutting down"):
            await task
    await asyncio.wait_for(state.until_quiet(), 1)
    assert state.end_requests() == 0
    with pytest.raises(TimeoutError):
        async with state.in_flight():
            raise TimeoutError


def test_keys_origins_and_configuration_are_the_given_ones() -> None:
    config = ServerConfig(api_key=("one", "two"), cors_origin=("https://a.example",))
    engine = Standing()
    state = ServerState(engine, config)
    assert state.keys.accept("Bearer two")
    assert state.cross_origin.headers("https://a.example")["Access-Control-Allow-Origin"]
    assert (state.engine, state.config) == (engine, config)
