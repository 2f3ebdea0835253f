"""Starting, overload, clients that leave, and shutting down under load."""

import asyncio
import time
from itertools import count
from typing import Any

import httpx
import pytest

from tests.server.conftest import ON_RAY, Server, StartServer
from tests.waiting import wait_for


def different(text: str, number: int) -> list[str]:
    """As many documents as `number`, alike in length alone: equal ones would be encoded once."""
    return [f"{i} {text}" for i in range(number)]


HEAVY = {"query": "q", "documents": different("word " * 245, 400), "return_documents": False}
LIGHT = {"query": "q", "documents": ["d"]}


@pytest.mark.not_on_ray  # whose proxy answers 404 until the application is there
def test_a_starting_server_says_so_and_then_serves(start_server: StartServer) -> None:
    server = start_server(ready=False)
    seen: set[tuple[int, str]] = set()

    def is_ready() -> bool:
        try:
            health, ready = (httpx.get(server.url + path) for path in ("/health", "/ready"))
        except httpx.TransportError:
            return False
        seen.add((health.status_code, ready.status_code))
        assert (health.status_code, health.json()["status"]) in {(200, "starting"), (200, "ok")}
        return ready.status_code == 200

    wait_for(is_ready, 120)
    assert seen <= {(200, 503), (200, 200)}
    assert httpx.get(server.url + "/version").json()["version"]
    card = httpx.get(server.url + "/v1/models").json()["data"][0]
    assert card["id"] == "all-MiniLM-L6-v2"
    assert card["max_model_len"] == 256
    assert server.terminate() == 0


def test_a_missing_model_ends_the_server_with_a_clear_error(start_server: StartServer) -> None:
    server = start_server("/nowhere/at/all", ready=False)
    assert server.process.wait(timeout=120) == 1
    assert "there is no folder '/nowhere/at/all'" in (server.log.splitlines()[-1] if ON_RAY else server.log)
    assert ON_RAY or "Traceback" not in server.log, "Ray's own log has one"


def test_a_wrong_option_is_explained(start_server: StartServer) -> None:
    server = start_server("--steps-in-flight", "5", ready=False)
    assert server.process.wait(timeout=60) == 2
    assert "steps_in_flight must be 1 or 2" in server.log


@pytest.mark.one_process
def test_work_of_a_client_that_leaves_disappears_from_the_queue(start_server: StartServer) -> None:
    server = start_server()

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            request = asyncio.create_task(client.post(server.url + "/rerank", json=HEAVY))
            async with asyncio.timeout(60):
                while "maxsimd_queue_tokens 0.0" in (await client.get(server.url + "/metrics")).text:
                    await asyncio.sleep(0.02)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    asyncio.run(leave())
    wait_for(lambda: server.metric("maxsimd_queue_tokens") == 0, seconds=5)
    assert server.metric("maxsimd_queue_sequences") == 0
    assert server.metric("maxsimd_cancelled_requests_total") == 1
    assert server.metric('maxsimd_http_requests_total{route="/rerank",status="499"}') == 1
    # 400 documents of 252 tokens would have been 100,000 tokens.
    assert server.metric("maxsimd_tokens_total") < 60_000
    assert httpx.post(server.url + "/rerank", json=LIGHT).status_code == 200


def test_a_full_queue_answers_429_and_loses_nobody(start_server: StartServer) -> None:
    server = start_server("--max-queued-tokens", "20000")

    async def overload() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120) as client:
            return await asyncio.gather(
                *(
                    client.post(
                        server.url + "/rerank", json=HEAVY | {"documents": different("word " * 245, 60)}
                    )
                    for _ in range(8)
                )
            )

    responses = asyncio.run(overload())
    statuses = sorted({response.status_code for response in responses})
    assert statuses == [200, 429]
    for response in responses:
        if response.status_code == 429:
            assert int(response.headers["Retry-After"]) >= 1
            assert response.json()["error"]["type"] == "QueueFullError"
        else:
            assert len(response.json()["results"]) == 60
    assert httpx.post(server.url + "/rerank", json=LIGHT).status_code == 200


def test_a_small_request_does_not_wait_for_a_large_one(server: Server) -> None:
    async def race() -> tuple[float, float]:
        async with httpx.AsyncClient(timeout=120) as client:
            started = time.perf_counter()

            async def timed(body: dict[str, Any]) -> float:
                response = await client.post(server.url + "/rerank", json=body)
                assert response.status_code == 200
                return time.perf_counter() - started

            large = asyncio.create_task(timed(HEAVY))
            await asyncio.sleep(0.3)
            small = await timed(LIGHT)
            return await large, small

    large, small = asyncio.run(race())
    assert small < large / 2


def test_sigterm_under_load_loses_no_accepted_request(start_server: StartServer) -> None:
    server = start_server()
    clients, rounds = 6, count()

    async def load() -> tuple[list[int], int]:
        statuses: list[int] = []
        broken = 0
        stop = False

        async def client_loop() -> None:
            nonlocal broken, stop
            async with httpx.AsyncClient(timeout=60) as client:
                while not stop:
                    try:
                        documents = different(f"{next(rounds)} " + "word " * 120, 30)
                        body = {"query": "q", "documents": documents}
                        response = await client.post(server.url + "/rerank", json=body)
                    except httpx.ConnectError:
                        return  # not accepted: nobody listens any more
                    except httpx.TransportError:
                        broken += 1
                        return
                    statuses.append(response.status_code)
                    if response.status_code == 200:
                        assert len(response.json()["results"]) == 30
                    else:
                        return

        loops = [asyncio.create_task(client_loop()) for _ in range(clients)]
        await asyncio.sleep(1.5)
        server.process.terminate()
        await asyncio.gather(*loops)
        stop = True
        return statuses, broken

    statuses, broken = asyncio.run(load())
    assert server.process.wait(timeout=60) == 0
    assert broken == 0, server.log
    assert statuses.count(200) >= clients
    # Ray's proxy refuses in its own way.
    assert set(statuses) <= {200, 404 if ON_RAY else 503}
    assert ("stopping: what is in flight" if ON_RAY else "drained") in server.log
