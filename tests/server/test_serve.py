"""The life of the server in this process: where it listens, how it drains, and with which status it ends."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from maxsimd.api import serve as life
from maxsimd.api.config import ServerConfig
from maxsimd.engine import Engine, EngineConfig

HEAVY = {"query": "q", "documents": [f"{i} " + "word " * 240 for i in range(400)]}
LIGHT = {"query": "q", "documents": ["d"]}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Serving:
    def __init__(self, url: str, status: asyncio.Task[int], engine: Engine) -> None:
        self.url, self.status, self.engine = url, status, engine
        self.client = httpx.AsyncClient(base_url=url, timeout=60)

    async def until_ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                assert not self.status.done()
                try:
                    if (await self.client.get("/ready")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)

    async def until_in_flight(self) -> None:
        async with asyncio.timeout(20):
            while self.engine.metrics.registry.get_sample_value("maxsimd_queue_tokens") == 0:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[Serving]:
    engines: list[Engine] = []

    def made(config: EngineConfig) -> Engine:
        engines.append(Engine(config))
        return engines[0]

    monkeypatch.setattr(life, "Engine", made)
    options = {"host": "127.0.0.1", "port": _free_port()} | options
    config = ServerConfig(**options)
    status = asyncio.create_task(
        life._serve(EngineConfig(dtype="float32", threads=1), config, time.perf_counter())
    )
    await asyncio.sleep(0)
    running = Serving(f"http://{config.host}:{config.port}", status, engines[0])
    try:
        await running.until_ready()
        yield running
    finally:
        await running.client.aclose()
        if not status.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(status, 60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_server_listens_where_it_should_until_a_signal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    caplog.set_level(logging.INFO, logger="maxsimd.serve")
    async with serving(monkeypatch, host="127.0.0.2") as server:
        assert server.url.startswith("http://127.0.0.2:")
        assert (await server.client.post("/rerank", json=LIGHT)).status_code == 200
        async with httpx.AsyncClient() as other:
            with pytest.raises(httpx.ConnectError):
                await other.get(server.url.replace("127.0.0.2", "127.0.0.1") + "/health")
        os.kill(os.getpid(), number)
        assert await asyncio.wait_for(server.status, 10) == 0
        assert not server.engine.is_healthy
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith(f"all-MiniLM-L6-v2 is ready on {server.url} after ")
    assert messages[0].endswith(" s: late-interaction, float32, packed on cpu")
    assert messages[-1] == "drained"


async def test_a_drain_refuses_new_work_and_finishes_what_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch) as server:
        body = HEAVY | {"documents": HEAVY["documents"][:30]}
        # A connection that stays open, and so gets through to a server that no longer listens.
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as other:
            assert (await other.get("/health")).status_code == 200
            heavy = asyncio.create_task(server.client.post("/rerank", json=body))
            await server.until_in_flight()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            refused = await other.post("/rerank", json=LIGHT)
        assert refused.status_code == 503
        assert refused.headers["Connection"] == "close"
        async with httpx.AsyncClient() as late:
            with pytest.raises(httpx.ConnectError):
                await late.get(server.url + "/health")
        answer = await heavy
        assert answer.status_code == 200
        assert len(answer.json()["results"]) == 30
        assert answer.headers["Connection"] == "close"
        assert await asyncio.wait_for(server.status, 10) == 0


async def test_a_drain_lasts_no_longer_than_the_grace_period(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(monkeypatch, grace_seconds=0.3) as server:
        heavy = asyncio.create_task(server.client.post("/rerank", json=HEAVY))
        await server.until_in_flight()
        asked = time.perf_counter()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(server.status, 20) == 0
        assert 0.3 < time.perf_counter() - asked < 15
        await asyncio.gather(heavy, return_exceptions=True)
    assert "some requests were still unfinished after 0 seconds" in caplog.text


async def _stop_of_itself(monkeypatch: pytest.MonkeyPatch, kill: Callable[[Engine], None]) -> int:
    async with serving(monkeypatch) as server:
        kill(server.engine)
        return await asyncio.wait_for(server.status, 10)


async def test_a_dead_engine_ends_the_server_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _stop_of_itself(monkeypatch, lambda engine: engine._died("of old age")) == 1


async def test_a_model_that_does_not_load_ends_the_server_with_status_1(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = ServerConfig(port=_free_port())
    status = await life._serve(EngineConfig(model="/nowhere/at/all"), config, time.perf_counter())
    assert status == 1
    (record,) = [record for record in caplog.records if record.name == "maxsimd.serve"]
    assert "there is no folder '/nowhere/at/all'" in record.getMessage()
    assert record.levelno == logging.ERROR
