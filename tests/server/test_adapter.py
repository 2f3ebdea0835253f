"""What the adapter adds to the handlers: connections, bodies in pieces, clients that leave."""

import asyncio
import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from maxsimd.api.app import STATE, build_app
from maxsimd.api.config import ServerConfig
from maxsimd.api.connection_table import ConnectionTable
from maxsimd.api.keys import ApiKeys
from maxsimd.api.listener import Listener
from maxsimd.api.sockets import open_sockets
from maxsimd.engine import Engine, EngineConfig
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

RERANK = {"query": "q", "documents": ["d"]}
HEAVY = {"query": "q", "documents": [f"{i} " + "word " * 240 for i in range(200)]}


class Wire:
    """A server and its bytes as they are."""

    def __init__(self, app: web.Application, port: int) -> None:
        self.state = app[STATE]
        self._port = port

    async def send(self, *lines: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write("\r\n".join([*lines, "Host: x", "", ""]).encode("latin-1") + body)
        await writer.drain()
        return reader, writer

    async def ask(self, *lines: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Status, headers (in lower case) and body of the answer on a connection of its own."""
        reader, writer = await self.send(*lines, "Connection: close", body=body)
        head, _, answered = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
        writer.close()
        status, *headers = head.decode("latin-1").split("\r\n")
        pairs = (header.partition(": ") for header in headers)
        return int(status.split()[1]), {name.lower(): value for name, _, value in pairs}, answered

    async def post(self, body: bytes, *headers: str) -> tuple[int, dict[str, str], bytes]:
        length = f"Content-Length: {len(body)}"
        return await self.ask("POST /rerank HTTP/1.1", length, *headers, body=body)

    def count(self, name: str, **labels: str) -> float | None:
        return self.state.engine.metrics.registry.get_sample_value(name, labels)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire() -> AsyncIterator[Wire]:
    async with Engine(EngineConfig(dtype="float32", threads=1)) as engine:
        config = ServerConfig(max_body_mb=2)
        app = build_app(engine, config)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        assert runner.server is not None
        table = ConnectionTable(config, 100, app[STATE].metrics)
        listener = Listener(runner.server, table, tls=None)
        listener.start(open_sockets("127.0.0.1", 0))
        yield Wire(app, listener.port)
        listener.close()
        await runner.cleanup()


async def test_an_answer_arrives_with_its_status_headers_and_body(wire: Wire) -> None:
    status, headers, body = await wire.post(json.dumps(RERANK).encode(), "X-Request-ID: mine-1")
    assert status == 200
    assert headers["x-request-id"] == "mine-1"
    assert headers["content-type"] == "application/json"
    assert "total;dur=" in headers["server-timing"]
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body)["results"][0]["index"] == 0
    status, headers, body = await wire.ask("DELETE /cache HTTP/1.1")
    assert (status, body) == (204, b"")
    assert "content-type" not in headers
    status, headers, body = await wire.ask("PUT /cache HTTP/1.1")
    assert (status, json.loads(body)["error"]["message"]) == (405, "this route takes DELETE")


@pytest.mark.parametrize("target", ["*", "/nope", "/v1%2Fscore", "//health"])
async def test_what_no_route_takes_is_a_404_of_ours(wire: Wire, target: str) -> None:
    status, headers, body = await wire.ask(f"OPTIONS {target} HTTP/1.1")
    assert status == 404
    assert json.loads(body)["error"]["type"] == "NotFoundError"
    assert headers["x-request-id"]


@pytest.mark.parametrize("target", ["/health?x=1", "/hea%6Cth", "http://host/health"])
async def test_a_path_is_decoded_and_without_the_query_string(wire: Wire, target: str) -> None:
    status, _, body = await wire.ask(f"GET {target} HTTP/1.1")
    assert (status, body) == (200, b'{"status": "ok"}')


async def test_head_sends_no_body(wire: Wire) -> None:
    status, headers, body = await wire.ask("HEAD /health HTTP/1.1")
    assert (status, headers["content-length"], body) == (200, "16", b"")


async def test_a_body_may_be_chunked_compressed_or_waited_for(wire: Wire) -> None:
    body = json.dumps(RERANK).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:5], body[5:])) + b"0\r\n\r\n"
    answers = [
        await wire.ask("POST /rerank HTTP/1.1", "Transfer-Encoding: chunked", body=chunks),
        await wire.post(gzip.compress(body), "Content-Encoding: gzip"),
        await wire.post(gzip.compress(body.ljust(2 * 1024 * 1024)), "Content-Encoding: gzip"),
        await wire.post(gzip.compress(body), "Content-Encoding: X-GZip"),
        await wire.post(gzip.compress(body[:9]) + gzip.compress(body[9:]), "Content-Encoding: gzip"),
        await wire.post(zlib.compress(body), "Content-Encoding: deflate"),
        await wire.post(zlib.compress(body, wbits=-15), "Content-Encoding: deflate"),
        await wire.post(body, "Content-Encoding: identity"),
        await wire.post(body.ljust(2 * 1024 * 1024)),
    ]
    for status, _, answered in answers:
        assert status == 200
        assert len(json.loads(answered)["results"]) == 1
    status, _, continued = await wire.post(body, "Expect: 100-continue")
    assert status == 100
    assert continued.startswith(b"HTTP/1.1 200 OK")


async def test_a_body_over_the_limit_is_a_413_compressed_or_not(wire: Wire) -> None:
    body = json.dumps(RERANK).encode().ljust(2 * 1024 * 1024 + 1)
    for status, _, answered in (
        await wire.post(body),
        await wire.post(gzip.compress(body), "Content-Encoding: gzip"),
    ):
        assert (status, json.loads(answered)["error"]["type"]) == (413, "RequestTooLargeError")


async def test_a_body_that_is_not_what_its_headers_say_is_a_400(wire: Wire) -> None:
    status, _, answered = await wire.post(b"not compressed", "Content-Encoding: gzip")
    assert status == 400
    assert json.loads(answered)["error"] == {
        "message": "the body is not what its headers say, or not all of it; check Content-Encoding and "
        "Content-Length",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (gzip.compress(b'{"query":"q","documents":["d"]}')[:-8], "gzip"),
        (gzip.compress(b'{"query":"q","documents":["d"]}')[:-1], "x-gzip"),
        (gzip.compress(b'{"query":"q","documents":["d"]}') + b"more", "gzip"),
        (zlib.compress(b'{"query":"q","documents":["d"]}')[:-1], "deflate"),
        (zlib.compress(b'{"query":"q","documents":["d"]}') + b"more", "deflate"),
    ],
    # The bytes of gzip have the time in them, and all processes must find tests of the same names.
    ids=[
        "gzip without its end",
        "gzip without its last byte",
        "gzip and more",
        "deflate breaks off",
        "deflate and more",
    ],
)
async def test_a_compressed_body_that_breaks_off_or_goes_on_is_a_400(
    wire: Wire, body: bytes, encoding: str
) -> None:
    status, _, answered = await wire.post(body, f"Content-Encoding: {encoding}")
    assert (status, json.loads(answered)["error"]["type"]) == (400, "BadRequestError")
    assert "or not all of it; check Content-Encoding" in json.loads(answered)["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        *(["Content-Encoding: gzip, gzip"], ["Content-Encoding: gzip", "Content-Encoding: gzip"]),
        *(["Content-Encoding: rot13"], ["Content-Encoding: br"], ["Content-Encoding: zstd"]),
        ["Content-Encoding: rot13", "Expect: 100-continue"],
    ],
)
async def test_another_encoding_is_a_415_that_names_ours(wire: Wire, headers: list[str]) -> None:
    status, answer, answered = await wire.post(gzip.compress(b"{}"), *headers)
    assert (status, answer["accept-encoding"]) == (415, "gzip, deflate")
    assert json.loads(answered)["error"] == {
        "message": "this Content-Encoding is not taken; use gzip, deflate, or none",
        "type": "UnsupportedMediaTypeError",
        "param": None,
        "code": 415,
    }


@pytest.mark.parametrize("headers", [[], ["Expect: 100-continue"]])
async def test_a_body_that_is_announced_too_large_is_not_waited_for(wire: Wire, headers: list[str]) -> None:
    too_large = f"Content-Length: {2 * 1024 * 1024 + 1}"
    reader, writer = await wire.send("POST /rerank HTTP/1.1", too_large, *headers)
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).lower()
    assert head.startswith(b"http/1.1 413 ")
    assert (b"connection: close" in head) == bool(headers)
    writer.close()
    await until(lambda: wire.count("maxsimd_http_in_flight") == 0)


async def test_no_answer_waits_for_a_body_announced_too_large(wire: Wire) -> None:
    too_large = f"Content-Length: {10**9}"
    for line, expected in (("POST /nope", 404), ("PUT /rerank", 405), ("GET /health", 200)):
        reader, writer = await wire.send(f"{line} HTTP/1.1", too_large)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 %d " % expected)
        writer.close()


async def test_keys_are_compared_byte_by_byte(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.state, "keys", ApiKeys(ServerConfig(api_key=("schlüssel",))))
    utf8 = "schlüssel".encode().decode("latin-1")
    for key, expected in ((utf8, 204), ("schlüssel", 401), ("schl", 401), ("\xff", 401)):
        status, *_ = await wire.ask("DELETE /cache HTTP/1.1", f"Authorization: Bearer {key}")
        assert status == expected, key


async def test_a_draining_server_closes_its_connections(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answered(patience: float) -> bytes:
        """The head of an answer, or `open` where the connection is not closed after it."""
        reader, writer = await wire.send("GET /health HTTP/1.1")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
        stays_open = False
        try:
            await asyncio.wait_for(reader.read(), patience)
        except TimeoutError:
            stays_open = True
        writer.close()
        return b"open" if stays_open else head

    assert await answered(0.2) == b"open"
    monkeypatch.setattr(wire.state, "draining", True)
    assert b"Connection: close" in await answered(10)


@pytest.mark.parametrize("sent", ["all", "half"])
async def test_a_client_that_leaves_takes_its_request_with_it(wire: Wire, sent: str) -> None:
    body = json.dumps(HEAVY).encode()
    length = f"Content-Length: {len(body)}"
    left, cancelled = _left(wire), wire.count("maxsimd_cancelled_requests_total") or 0
    _, writer = await wire.send(
        "POST /rerank HTTP/1.1", length, body=body if sent == "all" else body[: len(body) // 2]
    )
    await until(lambda: wire.count("maxsimd_http_in_flight") == 1)
    if sent == "all":
        await until(lambda: (wire.count("maxsimd_queue_tokens") or 0) > 0)
    writer.transport.abort()
    await until(lambda: wire.count("maxsimd_http_in_flight") == 0)
    assert _left(wire) == left + 1
    await until(lambda: wire.count("maxsimd_queue_tokens") == 0)
    assert wire.count("maxsimd_cancelled_requests_total") == cancelled + (sent == "all")


def _left(wire: Wire) -> float:
    """How many requests to rank have ended because their client has left."""
    return wire.count("maxsimd_http_requests_total", route="/rerank", status="499") or 0


async def test_the_lag_of_the_event_loop_is_measured(wire: Wire) -> None:
    def lag(name: str) -> Any:
        return wire.count(f"maxsimd_event_loop_lag_seconds_{name}")

    await until(lambda: lag("count") >= 1)
    assert 0 <= lag("sum") < 10
    before = lag("sum")
    time.sleep(0.3)  # noqa: ASYNC251 (this is what must be noticed)
    await until(lambda: lag("sum") > before + 0.15)
