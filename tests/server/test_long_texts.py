"""While a text of many megabytes is tokenised, others are answered."""

import threading
from typing import Any

import httpx

from tests.server.conftest import Server

# Some seconds of tokenising.
WORDS = "it was the best of times, it was the worst of times; we had everything before us. "
LONG = WORDS * (4_000_000 // len(WORDS))


def _tokenize(server: Server, text: str, **options: Any) -> Any:
    response = httpx.post(server.url + "/tokenize", json={"text": text} | options, timeout=300)
    assert response.status_code == 200, response.text[:1000]
    return response.json()


def test_small_requests_are_answered_beside_a_long_text(cross_encoder_server: Server) -> None:
    server = cross_encoder_server
    answers: list[Any] = []
    long = threading.Thread(target=lambda: answers.append(_tokenize(server, LONG)))
    long.start()
    small = 0
    while long.is_alive():
        assert httpx.get(server.url + "/ready", timeout=60).status_code == 200
        short = _tokenize(server, WORDS)["count"] - 2
        body = {"query": "a", "documents": ["b"]}
        assert httpx.post(server.url + "/rerank", json=body, timeout=60).status_code == 200
        small += 1
    assert small > 5, "had they waited for the long text, it would be one or two"
    assert answers[0]["count"] == len(answers[0]["tokens"]) == 2 + short * (len(LONG) // len(WORDS))
