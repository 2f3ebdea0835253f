"""Bad input gets an answer that says what to change, and harms nobody."""

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server, StartServer


def check(response: httpx.Response, status: int, message: str, param: str | None = None) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status), error
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"]
    assert response.headers["x-request-id"]


RERANK = {"query": "q", "documents": ["d"]}
STRICT = {"long_documents": "error"}
BAD_REQUESTS: list[tuple[str, Any, str, str | None]] = [
    (
        "/score",
        {"text_1": ["a", "b"], "text_2": ["b", "c", "d"]},
        "must be either 1:1, 1:N or N:N; there are 2 queries and 3 documents",
        "text_2",
    ),
    ("/score", {"text_1": ["a"]}, "text_2 is missing", "text_2"),
    ("/score", {}, "queries and documents are missing", "queries"),
    ("/score", {"queries": [], "documents": ["a"]}, "queries is empty", "queries"),
    ("/rerank", {"query": "q", "documents": []}, "documents is empty", "documents"),
    ("/rerank", {"query": "q", "texts": []}, "texts is empty; give at least one text", "texts"),
    ("/score", {"text_1": "q", "text_2": []}, "text_2 is empty", "text_2"),
    ("/score", {"data_1": [], "data_2": "d"}, "data_1 is empty", "data_1"),
    ("/score", STRICT | {"queries": "q", "items": ["d ", "d " * 900]}, "items[1] has 902 tokens", "items"),
    ("/score", STRICT | {"text_1": "q " * 900, "text_2": "d"}, "text_1[0] has 902 tokens", "text_1"),
    (
        "/rerank",
        {"query": "q", "texts": ["d " * 900], "truncate": False},
        "texts[0] has 902 tokens, but at most 256 can be run",
        "texts",
    ),
    (
        "/rerank",
        {"query": "q " * 900, "documents": ["d"], "long_documents": "error"},
        "query has 902 tokens",
        "query",
    ),
    ("/rerank", {"documents": ["a"]}, "query is missing", "query"),
    ("/rerank", {"query": "q"}, "documents is missing", "documents"),
    ("/rerank", {"query": 7, "documents": ["a"]}, "query: expected", "query"),
    ("/rerank", {"query": "q", "documents": ["a", 7]}, "documents[1]: expected", "documents"),
    ("/rerank", {"query": "q", "documents": [{"title": "x"}]}, 'without a "text"', "documents"),
    (
        "/rerank",
        {"query": "q", "documents": [{"a": "x"}, {"b": "y", "a": None}], "rank_fields": ["a"]},
        "documents[1] has none of the fields that rank_fields names",
        "rank_fields",
    ),
    ("/rerank", RERANK | {"top_n": -1}, "top_n: expected", "top_n"),
    ("/rerank", RERANK | {"top_n": "two"}, "top_n: expected", "top_n"),
    ("/rerank", RERANK | {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "truncate_prompt_tokens"),
    ("/rerank", RERANK | {"truncate_prompt_tokens": 257}, "more than the 256", "truncate_prompt_tokens"),
    ("/rerank", RERANK | {"truncation_side": "up"}, "truncation_side", "truncation_side"),
    ("/rerank", RERANK | {"timeout": 0}, "timeout", "timeout"),
    ("/v1/embeddings", {"input": []}, "not empty", "input"),
    ("/v1/embeddings", {"input": {"a": 1}}, "input must be", "input"),
    ("/v1/embeddings", {"input": [[1, 2]]}, "input has token ids", "input"),
    ("/v1/embeddings", {"input": "a", "dimensions": 385}, "from 1 to 384", "dimensions"),
    ("/v1/embeddings", {"input": "a", "input_type": "poem"}, "not known", "input_type"),
    ("/pooling", {"input": "a", "task": "plugin"}, "task", "task"),
    ("/pooling", {"input": "a", "task": "classify"}, "cannot classify; it can embed", "task"),
    ("/tokenize", {}, "text is missing", "text"),
    ("/detokenize", {"tokens": [99_999_999]}, "must be below", "tokens"),
]


@pytest.mark.parametrize(("path", "body", "message", "param"), BAD_REQUESTS)
def test_the_answer_to_a_bad_request_says_what_to_change(
    server: Server, path: str, body: Any, message: str, param: str | None
) -> None:
    check(httpx.post(server.url + path, json=body), 400, message, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2", b"\xff\xfe", b'"text"', b"null"])
def test_a_body_that_is_no_json_object_is_a_400(server: Server, body: bytes) -> None:
    response = httpx.post(server.url + "/rerank", content=body)
    assert response.status_code == 400
    assert "body" in response.json()["error"]["message"]


@pytest.mark.parametrize("escape", [rb"\ud800", rb"\udc00", rb"\ud800x", rb"\ud800\ud800"])
def test_half_of_a_character_is_a_400(server: Server, escape: bytes) -> None:
    for path, body in (
        ("/rerank", b'{"query": "%s", "documents": ["a"]}'),
        ("/rerank", b'{"query": "q", "documents": [{"text": "%s"}]}'),
        ("/score", b'{"queries": "q", "documents": ["%s"]}'),
        ("/v1/embeddings", b'{"input": "%s"}'),
        ("/pooling", b'{"input": ["%s"]}'),
        ("/tokenize", b'{"text": "%s"}'),
    ):
        response = httpx.post(server.url + path, content=body % escape)
        check(response, 400, "half of a character")


def test_a_body_that_is_not_utf8_is_a_400(server: Server) -> None:
    body = json.dumps(RERANK)
    marked = httpx.post(server.url + "/rerank", content=body.encode("utf-8-sig"))
    assert marked.status_code == 200
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
        check(httpx.post(server.url + "/rerank", content=body.encode(encoding)), 400, "send JSON in UTF-8")


def test_unusual_text_is_scored(server: Server) -> None:
    documents = ["", " ", "\x00", "🙂" * 50, "漢字 עברית العربية", "a" * 20_000, "\n\t"]
    response = httpx.post(server.url + "/rerank", json={"query": "", "documents": documents}, timeout=60)
    assert response.status_code == 200
    assert len(response.json()["results"]) == len(documents)


def test_unknown_fields_are_ignored(server: Server) -> None:
    body = RERANK | {"user": "me", "return_images": False, "cache_salt": None}
    assert httpx.post(server.url + "/rerank", json=body).status_code == 200


def test_null_means_left_open(server: Server) -> None:
    names = """model top_n return_documents priority timeout use_activation raw_scores rank_fields texts
        max_tokens_per_doc max_tokens_per_query truncate_prompt_tokens truncation_side long_documents"""
    nulls = dict.fromkeys(names.split())
    response = httpx.post(server.url + "/rerank", json=RERANK | nulls)
    assert response.status_code == 200, response.text
    assert response.json()["results"][0]["document"] == {"text": "d"}
    nulls = dict.fromkeys(("dimensions", "encoding_format", "input_type", "user", "priority"))
    assert httpx.post(server.url + "/v1/embeddings", json={"input": "a"} | nulls).status_code == 200


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"",' * 300_000 + b'""', "more than 20000 strings"),
        (b"{%s}" % b",".join(b'"%x":0' % i for i in range(80_000)), "more than 20000 strings"),
        (b"[]," * 300_000 + b"[]", "more than 10000 arrays and objects"),
    ],
)
def test_a_body_of_more_than_documents_need_is_a_413(server: Server, content: bytes, message: str) -> None:
    body = b'{"query":"q","documents":[' + content + b"]}"
    check(httpx.post(server.url + "/rerank", content=body), 413, message)


def test_a_timeout_is_a_504(server: Server) -> None:
    # Different documents: equal ones are encoded once, which may take no longer than that.
    documents = [f"{i} " + "word " * 240 for i in range(400)]
    body = {"query": "q", "documents": documents, "timeout": 0.05}
    check(httpx.post(server.url + "/rerank", json=body, timeout=60), 504, "not done within 0.05 seconds")


@pytest.mark.not_on_ray
def test_the_clients_request_id_comes_back(server: Server) -> None:
    response = httpx.post(server.url + "/rerank", json=RERANK, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert "total;dur=" in response.headers["server-timing"]
    strange = httpx.post(server.url + "/rerank", json=RERANK, headers={"x-request-id": "a b"})
    assert strange.headers["x-request-id"] != "a b"


def test_keys_guard_everything_but_health(start_server: StartServer, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("second\nthird\n")
    server = start_server("--api-key", "first", "--api-key-file", str(tmp_path / "keys"))
    assert httpx.get(server.url + "/health").status_code == 200
    for path in ("/rerank", "/score", "/pooling", "/v1/embeddings"):
        check(httpx.post(server.url + path, json=RERANK), 401, "Authorization: Bearer")
    check(httpx.get(server.url + "/metrics"), 401, "Authorization: Bearer")
    for key, status in (("first", 200), ("third", 200), ("fourth", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.post(server.url + "/rerank", json=RERANK, headers=headers).status_code == status


def test_no_text_of_a_user_is_logged(server: Server) -> None:
    body = {"query": "a very secret question", "documents": ["an even more secret document"]}
    httpx.post(server.url + "/rerank", json=body)
    httpx.post(server.url + "/rerank", json=body | {"top_n": -1})
    assert "POST /rerank 200" in server.log
    assert "secret" not in server.log
