"""What probes read: /health says whether a process is to be left alone, /ready whether it takes work."""

from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestClient, TestServer

from maxsimd.api.app import STATE, build_app
from maxsimd.api.config import ServerConfig
from maxsimd.engine import Engine, EngineDeadError
from maxsimd.engine.actors.runner import RunnerActor


@pytest.fixture
async def client() -> AsyncIterator[TestClient]:
    """A client of a server in this process, whose engine is not started yet."""
    engine = Engine()
    async with TestClient(TestServer(build_app(engine, ServerConfig()))) as client:
        yield client
    await engine.stop()


async def _probe(client: TestClient) -> tuple[int, int, str]:
    """The status of /health and of /ready, and the word that both say."""
    health, ready = await client.get("/health"), await client.get("/ready")
    word = (await health.json())["status"]
    assert (await ready.json())["status"] == word
    assert ("Retry-After" in ready.headers) == (ready.status != 200)
    return health.status, ready.status, word


async def test_a_server_is_healthy_while_it_loads_serves_and_drains(client: TestClient) -> None:
    state = client.app[STATE]  # type: ignore[index]
    assert await _probe(client) == (200, 503, "starting")
    await state.engine.start()
    assert await _probe(client) == (200, 200, "ok")
    state.draining = True
    assert await _probe(client) == (200, 503, "draining")


async def test_a_dead_engine_is_not_healthy_until_it_is_started_again(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(*args: object) -> None:
        raise RuntimeError("beyond repair")

    engine = client.app[STATE].engine  # type: ignore[index]
    await engine.start()
    with monkeypatch.context() as broken:
        broken.setattr(RunnerActor, "_run", die)
        with pytest.raises(EngineDeadError):
            await engine.score("a", ["b"])
    assert await _probe(client) == (503, 503, "dead")
    await engine.start()
    assert await _probe(client) == (200, 200, "ok")
