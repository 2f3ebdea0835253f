"""A server refuses what is too much and goes on serving, beside a text of many megabytes, too."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server, StartServer


@pytest.fixture(scope="module")
def server(module_starter: StartServer, bert_cross_encoder: str) -> Server:
    return module_starter(bert_cross_encoder, "--max-queued-tokens", "20000", "--max-request-tokens", "30000")


def _documents(number: int, **options: Any) -> dict[str, Any]:
    """A request of about 250 tokens a document."""
    documents = [f"{i} " + "word " * 245 for i in range(number)]
    return {"query": "q", "documents": documents, "return_documents": False, **options}


def test_a_full_queue_answers_429_and_loses_nobody(server: Server) -> None:
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


def test_small_requests_are_answered_beside_a_long_text(server: Server) -> None:
    words = "it was the best of times, it was the worst of times; we had everything before us. "
    times = 2_000_000 // len(words)  # some seconds of tokenising

    def count(text: str) -> int:
        return int(httpx.post(server.url + "/tokenize", json={"text": text}, timeout=300).json()["count"])

    with ThreadPoolExecutor(1) as threads:
        long, small = threads.submit(count, words * times), 0
        while not long.done():
            assert httpx.post(server.url + "/rerank", json=_documents(1), timeout=60).status_code == 200
            small += 1
            time.sleep(0.02)
        assert small > 5, "had they waited for the long text, it would be one or two"
        assert long.result() == 2 + times * (count(words) - 2)
