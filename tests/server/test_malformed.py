"""Answers to any bytes are ours: to requests in every form that HTTP has, and to what is not HTTP."""

import gzip
import json
import socket
import struct
import zlib

import httpx

from tests.server.conftest import Server
from tests.server.raw_client import RERANK, RawClient, head, post

LENGTH = f"Content-Length: {len(RERANK)}"
NOT_HTTP = "this is not HTTP/1.1"
NOT_ALL = "or is incomplete; check Content-Encoding"
MOST_BYTES = 8 << 20
CLOSE, GZIP, CHUNKED = "Connection: close", "Content-Encoding: gzip", "Transfer-Encoding: chunked"
POST = "POST /rerank HTTP/1.1"
CHUNKS = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (RERANK[:5], RERANK[5:], b""))
TAKEN: dict[str, bytes] = {
    "a query string": head("GET /health?x=1 HTTP/1.1", CLOSE),
    "an escaped path": head("GET /hea%6Cth HTTP/1.1", CLOSE),
    "a whole URL": head("GET http://host/health HTTP/1.1", CLOSE),
    "a wait for 100 Continue": post("/rerank", RERANK, CLOSE, "Expect: 100-continue"),
    "chunks": head(POST, CLOSE, CHUNKED) + CHUNKS,
    "gzip": post("/rerank", gzip.compress(RERANK.ljust(MOST_BYTES), 1), CLOSE, GZIP),
    "deflate": post("/rerank", zlib.compress(RERANK), CLOSE, "Content-Encoding: deflate"),
    "identity": post("/rerank", RERANK.ljust(MOST_BYTES), CLOSE, "Content-Encoding: identity"),
}
# The bytes that are sent, the status, and a part of the message.
MALFORMED: dict[str, tuple[bytes, int, str]] = {
    "no HTTP": (b"\x00\x01\x02 garbage\r\n\r\n", 400, NOT_HTTP),
    "HTTPS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), 400, "not HTTPS"),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 400, "only HTTP/1.1"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "HTTP/1.1"),
    "an unknown method": (head("FOO /rerank HTTP/1.1"), 400, NOT_HTTP),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, NOT_HTTP),
    "two hosts": (head("GET /health HTTP/1.1", "Host: y"), 400, "there are two Host headers; send one"),
    "two types": (post("/rerank", RERANK, "Content-Type: application/json", "Content-Type: text/plain"),
                  400, "there are two Content-Type headers; send one"),
    "a broken URL": (head("GET http://[::1 HTTP/1.1"), 400, NOT_HTTP),
    "a long path": (head(f"GET /{'x' * 100_000} HTTP/1.1"), 414, "at most 8190 bytes"),
    "a long header": (head("GET /health HTTP/1.1", "X: " + "x" * 100_000), 431, "at most 16380 bytes"),
    "many headers": (head("GET /health HTTP/1.1", *[f"X-{i}: 1" for i in range(5000)]),
                     431, "at most 128 are taken"),
    "two lengths": (head(POST, LENGTH, "Content-Length: 5") + RERANK, 400, NOT_HTTP),
    "a length and chunks": (head(POST, LENGTH, CHUNKED) + b"0\r\n\r\n", 400, NOT_HTTP),
    "a chunk of no size": (head(POST, CHUNKED) + b"zz\r\nabc", 400, NOT_HTTP),
    "no gzip": (post("/rerank", RERANK, GZIP), 400, "check Content-Encoding"),
    "an expectation": (post("/rerank", RERANK, "Expect: wonders"), 417, "100-continue"),
    "an expectation in bytes, with a line break in the path": (
        b"POST /a%0ab HTTP/1.1\r\nHost: x\r\nExpect: \xa9I\r\nContent-Length: 0\r\n\r\n", 417, "100-cont"),
    "a tunnel": (head("CONNECT example.com:443 HTTP/1.1"), 404, "no such route"),
    "gzip that breaks off": (post("/rerank", gzip.compress(RERANK)[:-1], GZIP), 400, NOT_ALL),
    "another encoding": (post("/rerank", RERANK, "Content-Encoding: br"), 415, "use gzip, deflate, or none"),
    "a large body": (post("/rerank", RERANK.ljust(MOST_BYTES + 1)), 413, "too large"),
    "a bomb": (post("/rerank", gzip.compress(bytes(MOST_BYTES + 1), 1), GZIP), 413, "too large"),
    "a large body that does not come": (head(POST, "Content-Length: 9999999"), 413, "too large"),
    "one after 100 Continue": (head(POST, "Content-Length: 9999999", "Expect: 100-continue"), 413,
                               "too large"),
    "a body for a wrong path": (head("POST /nope HTTP/1.1", "Content-Length: 9999999"), 404, "no such route"),
    "a body for a wrong method": (head("PUT /rerank HTTP/1.1", "Content-Length: 9999999"), 405, "takes POST"),
    "options of all": (head("OPTIONS * HTTP/1.1"), 404, "no such route"),
    "garbage after a request": (head("GET /health HTTP/1.1") + b"GARBAGE\r\n\r\n", 400, NOT_HTTP),
}  # fmt: skip


def test_requests_are_taken_in_every_form(strict_server: Server) -> None:
    for name, sent in TAKEN.items():
        received = RawClient(strict_server.url).send(sent).receive()
        assert b"HTTP/1.1 200 OK\r\n" in received.data, name
    for protocol in ("h2c", "websocket"):
        upgrade = post("/rerank", RERANK, "Connection: Upgrade", f"UPGRADE: {protocol}")
        sent = upgrade + head("GET /health HTTP/1.1", CLOSE)
        received = RawClient(strict_server.url).send(sent).receive()
        assert received.data.count(b"HTTP/1.1 200 OK\r\n") == 2
    received = RawClient(strict_server.url).send(head("HEAD /health HTTP/1.1", CLOSE)).receive()
    assert received.headers["content-length"] == str(len(httpx.get(strict_server.url + "/health").content))
    assert received.data.endswith(b"\r\n\r\n")


def test_malformed_requests_get_an_error_of_the_one_shape(strict_server: Server) -> None:
    for name, (sent, status, message) in MALFORMED.items():
        received = RawClient(strict_server.url).send(sent).receive()
        assert received.status == status, name
        error = received.error
        assert set(error) == {"message", "type", "param", "code"}, name
        assert message in error["message"], name
        assert error["code"] == status
        assert len(received.headers["x-request-id"]) == 32
        assert received.headers["x-content-type-options"] == "nosniff"
        assert received.headers["server"] == "maxsimd"
        assert received.closed, name
    assert "Traceback" not in strict_server.log
    assert " ERROR " not in strict_server.log
    assert "GARBAGE" not in strict_server.log
    assert 'status="500"' not in httpx.get(strict_server.url + "/metrics").text


def test_a_chunk_that_breaks_off_the_body_is_not_waited_for(strict_server: Server) -> None:
    start = head(POST, CHUNKED) + b"5\r\nhello\r\n"
    received = RawClient(strict_server.url).send(start, b"zz\r\n", every=0.1).receive()
    assert received.status == 400
    assert NOT_HTTP in received.error["message"]


def test_a_client_that_leaves_at_100_continue_is_no_error(strict_server: Server) -> None:
    before = len(strict_server.log)
    for _ in range(50):
        client = RawClient(strict_server.url)
        client.send(head("POST /tokenize HTTP/1.1", "Expect: 100-continue", "Content-Length: 9"))
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    assert httpx.get(strict_server.url + "/health").status_code == 200
    assert " ERROR " not in strict_server.log[before:]


def test_only_a_little_of_what_was_sent_is_repeated(strict_server: Server) -> None:
    long = "x\u202e\x07\n" * 50_000
    bodies = [
        {"query": "q", "documents": ["d"], "model": long},
        {"query": "q", "documents": ["d"], "truncation_side": long},
        {"input": "q", "input_type": long},
        {"input": "q", "prompt_name": long},
        {"query": "q", "documents": [{"a": "b"}], "rank_fields": [long]},
    ]
    for body in bodies:
        path = "/v1/embeddings" if "input" in body else "/rerank"
        response = httpx.post(strict_server.url + path, content=json.dumps(body).encode())
        assert 400 <= response.status_code < 500
        error = response.json()["error"]
        assert len(response.content) < 3_000  # a message, twice
        assert error["message"].isprintable(), error
