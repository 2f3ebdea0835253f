"""Odd input harms nobody, what takes too long ends, and no text of a user is logged."""

import httpx

from tests.server.conftest import Server
from tests.waiting import wait_for

RERANK = {"query": "q", "documents": ["d"]}


def test_unusual_text_and_unknown_fields_do_no_harm(server: Server) -> None:
    documents = ["", " ", "\x00", "🙂" * 50, "漢字 עברית العربية", "a" * 20_000, "\n\t"]
    body = {"query": "", "documents": documents, "user": "me", "model": None, "timeout": None, "texts": None}
    response = httpx.post(server.url + "/rerank", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert len(response.json()["results"]) == len(documents)


def test_a_timeout_is_a_504(server: Server) -> None:
    # Different documents: equal ones are encoded once, which may take no longer than that.
    documents = [f"{i} " + "word " * 240 for i in range(100)]
    body = {"query": "q", "documents": documents, "timeout": 0.05}
    response = httpx.post(server.url + "/rerank", json=body, timeout=60)
    assert response.status_code == 504
    assert "not done within 0.05 seconds" in response.json()["error"]["message"]


def test_no_text_of_a_user_is_logged(server: Server) -> None:
    body = {"query": "a very secret question", "documents": ["an even more secret document"]}
    httpx.post(server.url + "/rerank", json=body)
    httpx.post(server.url + "/rerank", json=body | {"top_n": -1})
    wait_for(lambda: "POST /rerank 400" in server.log)
    assert "secret" not in server.log
