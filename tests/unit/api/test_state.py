"""When a server takes work, and how requests in flight are ended."""

import asyncio
from typing import Any

import pytest

from maxsimd.api.config import ServerConfig
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine, EngineDeadError, EngineNotReadyError


class Standing(Engine):
    """An engine that says how it is, without a model of its own."""

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


async def test_requests_are_ended_once_and_timeouts_stay_timeouts() -> None:
    state = ServerState(Standing(), ServerConfig())

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
