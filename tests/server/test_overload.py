"""What a server refuses at the door, and what it goes on serving meanwhile."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server, StartServer


@pytest.fixture(scope="module")
def server(module_starter: StartServer) -> Server:
    """One whose speed is known: a step was full."""
    server = module_starter(
        "--dtype", "float32", "--max-wait-seconds", "1", "--max-request-tokens", "30000", "--cache-mb", "0"
    )
    assert httpx.post(server.url + "/rerank", json=_documents(40), timeout=60).status_code == 200
    return server


def _documents(number: int, **options: Any) -> dict[str, Any]:
    """A request of about 250 tokens a document."""
    documents = [f"{i} " + "word " * 245 for i in range(number)]
    return {"query": "q", "documents": documents, "return_documents": False, **options}


@pytest.mark.one_process
@pytest.mark.exhaustive
def test_only_requests_that_would_wait_too_long_are_refused(server: Server) -> None:
    async def overload() -> tuple[list[httpx.Response], list[httpx.Response]]:
        async with httpx.AsyncClient(timeout=120) as client:

            async def post(body: dict[str, Any]) -> httpx.Response:
                return await client.post(server.url + "/rerank", json=body)

            crowd = [asyncio.create_task(post(_documents(20))) for _ in range(16)]
            await asyncio.sleep(0.3)
            small = [await post(_documents(1)) for _ in range(5)]
            return await asyncio.gather(*crowd), small

    crowd, small = asyncio.run(overload())
    refused = [response for response in crowd if response.status_code == 429]
    served = [response for response in crowd if response.status_code == 200]
    assert len(refused) + len(served) == 16
    assert served
    for response in refused:
        assert int(response.headers["Retry-After"]) >= 1
        assert "would wait for about" in response.json()["error"]["message"]
    assert refused
    assert [response.text for response in small if response.status_code != 200] == []
    assert server.metric('maxsimd_refused_requests_total{reason="wait"}') == len(refused)
    assert server.metric("maxsimd_preparing_requests") == 0


def test_what_is_too_much_by_itself_is_413(server: Server) -> None:
    response = httpx.post(server.url + "/rerank", json=_documents(200), timeout=60)
    assert response.status_code == 413
    assert "more than the 30000 that one may have" in response.json()["error"]["message"]
    windows = {"query": "q", "documents": ["word " * 80_000], "long_documents": "window"}
    response = httpx.post(server.url + "/rerank", json=windows | {"truncate_prompt_tokens": 4}, timeout=60)
    assert response.status_code == 413
    assert "more than the 30000 tokens that one may have" in response.json()["error"]["message"]
    response = httpx.post(server.url + "/rerank", json=_documents(80, timeout=0.02), timeout=60)
    assert response.status_code in (413, 504), "unless its time is up before its tokens are counted"
    assert httpx.post(server.url + "/rerank", json=_documents(1)).status_code == 200


def test_a_full_queue_answers_429_and_loses_nobody(
    start_server: StartServer, bert_cross_encoder: str
) -> None:
    server = start_server(bert_cross_encoder, "--max-queued-tokens", "20000")

    async def overload() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120) as client:
            url = server.url + "/rerank"
            return await asyncio.gather(*(client.post(url, json=_documents(60)) for _ in range(8)))

    responses = asyncio.run(overload())
    assert sorted({response.status_code for response in responses}) == [200, 429]
    for response in responses:
        if response.status_code == 429:
            assert int(response.headers["Retry-After"]) >= 1
            assert response.json()["error"]["type"] == "QueueFullError"
        else:
            assert len(response.json()["results"]) == 60
    assert httpx.post(server.url + "/rerank", json=_documents(1)).status_code == 200
