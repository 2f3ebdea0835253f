"""Bad input gets an answer that says what to change, and harms nobody."""

from typing import Any

import httpx

from tests.server.conftest import Server

RERANK = {"query": "q", "documents": ["d"]}
STRICT = {"long_documents": "error"}
# One of each kind; tests/unit/api/handlers has them all.
BAD_REQUESTS: list[tuple[str, Any, int, str, str | None]] = [
    ("/score", {"text_1": ["a", "b"], "text_2": ["b", "c", "d"]}, 400, "there are 2 queries and 3", "text_2"),
    ("/score", {"text_1": ["a"]}, 400, "text_2 is missing", "text_2"),
    ("/score", STRICT | {"queries": "q", "items": ["d ", "d " * 900]}, 400, "items[1] has 902 tok", "items"),
    ("/rerank", STRICT | {"query": "q " * 900, "documents": ["d"]}, 400, "query has 902 tokens", "query"),
    ("/rerank", RERANK | {"top_n": -1}, 400, "top_n: expected", "top_n"),
    ("/rerank", RERANK | {"truncate_prompt_tokens": 257}, 400, "than the 256", "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "dimensions": 385}, 400, "from 1 to 384", "dimensions"),
    ("/pooling", {"input": "a", "task": "classify"}, 400, "cannot classify; it can embed", "task"),
    ("/detokenize", {"tokens": [99_999_999]}, 400, "must be below", "tokens"),
    ("/rerank", RERANK | {"model": "nope"}, 404, "served here: `all-MiniLM-L6-v2`.", "model"),
    ("/nope", RERANK, 404, "no such route", None),
    ("/health", RERANK, 405, "takes GET", None),
    ("/rerank", RERANK | {"documents": ["d"] * 501}, 413, "501 entries, but at most 500", "documents"),
]


def test_the_answer_to_a_bad_request_says_what_to_change(server: Server) -> None:
    for path, body, status, message, param in BAD_REQUESTS:
        response = httpx.post(server.url + path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (status, status, param), error
        assert message in error["message"]
        assert response.headers["x-request-id"]


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
    assert "POST /rerank 200" in server.log
    assert "secret" not in server.log
