"""Bad input gets an answer that says what to change, and harms nobody."""

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server


def check(response: httpx.Response, status: int, message: str, param: str | None = None) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status), error
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"]
    assert response.headers["x-request-id"]


RERANK = {"query": "q", "documents": ["d"]}
STRICT = {"long_documents": "error"}
# One of each kind; tests/unit/api/handlers has them all.
BAD_REQUESTS: list[tuple[str, Any, str, str | None]] = [
    (
        "/score",
        {"text_1": ["a", "b"], "text_2": ["b", "c", "d"]},
        "must be either 1:1, 1:N or N:N; there are 2 queries and 3 documents",
        "text_2",
    ),
    ("/score", {"text_1": ["a"]}, "text_2 is missing", "text_2"),
    ("/score", STRICT | {"queries": "q", "items": ["d ", "d " * 900]}, "items[1] has 902 tokens", "items"),
    ("/rerank", STRICT | {"query": "q " * 900, "documents": ["d"]}, "query has 902 tokens", "query"),
    ("/rerank", {"query": "q", "documents": ["a", 7]}, "documents[1]: expected", "documents"),
    ("/rerank", RERANK | {"top_n": -1}, "top_n: expected", "top_n"),
    ("/rerank", RERANK | {"truncate_prompt_tokens": 257}, "more than the 256", "truncate_prompt_tokens"),
    ("/rerank", RERANK | {"long_documents": "all"}, "long_documents", "long_documents"),
    ("/rerank", RERANK | {"cache": "yes"}, "cache", "cache"),
    ("/v1/embeddings", {"input": "a", "dimensions": 385}, "from 1 to 384", "dimensions"),
    ("/pooling", {"input": "a", "task": "classify"}, "cannot classify; it can embed", "task"),
    ("/detokenize", {"tokens": [99_999_999]}, "must be below", "tokens"),
]


def test_the_answer_to_a_bad_request_says_what_to_change(server: Server) -> None:
    for path, body, message, param in BAD_REQUESTS:
        check(httpx.post(server.url + path, json=body), 400, message, param)
    for content in (b"{", b"\xff\xfe", json.dumps(RERANK).encode("utf-16"), b'{"query": "\\ud800"}'):
        check(httpx.post(server.url + "/rerank", content=content), 400, "")


def test_unusual_text_is_scored(server: Server) -> None:
    documents = ["", " ", "\x00", "🙂" * 50, "漢字 עברית العربية", "a" * 20_000, "\n\t"]
    response = httpx.post(server.url + "/rerank", json={"query": "", "documents": documents}, timeout=60)
    assert response.status_code == 200
    assert len(response.json()["results"]) == len(documents)


def test_unknown_fields_and_null_are_ignored(server: Server) -> None:
    body = RERANK | {"user": "me", "cache_salt": None} | dict.fromkeys(("model", "top_n", "timeout", "texts"))
    response = httpx.post(server.url + "/rerank", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["results"][0]["document"] == {"text": "d"}


def test_unknown_models_routes_and_methods(server: Server) -> None:
    wrong_model = httpx.post(server.url + "/rerank", json=RERANK | {"model": "nope"})
    check(wrong_model, 404, "The model `nope` does not exist; served here: `all-MiniLM-L6-v2`.", "model")
    right_model = httpx.post(server.url + "/rerank", json=RERANK | {"model": "all-MiniLM-L6-v2"})
    assert right_model.status_code == 200
    check(httpx.get(server.url + "/nope"), 404, "no such route")
    check(httpx.get(server.url + "/rerank"), 405, "takes POST")


def test_too_many_documents_and_too_large_bodies_are_413(server: Server) -> None:
    many = httpx.post(server.url + "/rerank", json={"query": "q", "documents": ["d"] * 501})
    check(many, 413, "501 entries, but at most 500", "documents")
    large = httpx.post(server.url + "/rerank", json={"query": "q", "documents": ["d" * 2_000_000]})
    check(large, 413, "too large")


def test_a_timeout_is_a_504(server: Server) -> None:
    # Different documents: equal ones are encoded once, which may take no longer than that.
    documents = [f"{i} " + "word " * 240 for i in range(100)]
    body = {"query": "q", "documents": documents, "timeout": 0.05}
    check(httpx.post(server.url + "/rerank", json=body, timeout=60), 504, "not done within 0.05 seconds")


@pytest.mark.not_on_ray
def test_the_clients_request_id_comes_back(server: Server) -> None:
    response = httpx.post(server.url + "/rerank", json=RERANK, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert "total;dur=" in response.headers["server-timing"]
    strange = httpx.post(server.url + "/rerank", json=RERANK, headers={"x-request-id": "a b"})
    assert strange.headers["x-request-id"] != "a b"


def test_no_text_of_a_user_is_logged(server: Server) -> None:
    body = {"query": "a very secret question", "documents": ["an even more secret document"]}
    httpx.post(server.url + "/rerank", json=body)
    httpx.post(server.url + "/rerank", json=body | {"top_n": -1})
    assert "POST /rerank 200" in server.log
    assert "secret" not in server.log
