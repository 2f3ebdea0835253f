"""Clients that are slow, silent or too many: each is limited, and none keeps others out."""

import errno
import json
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import Server, StartServer
from tests.server.raw_client import RERANK, RawClient, head, post
from tests.waiting import wait_for

# Many times any limit: a busy machine may be late.
LATE = 15.0
POST, CHUNKED = "POST /rerank HTTP/1.1", "Transfer-Encoding: chunked"
# Answered with some 9 MB, more than fits into the system's buffers.
LONG_ANSWER = b'{"tokens": [%s]}' % b",".join([b"1000"] * 1_000_000)


def cut(server: Server, reason: str) -> float:
    return server.metric(f'maxsimd_http_cut_connections_total{{reason="{reason}"}}')


# Requests that come too slowly: headers without an end, a part of a body or of a chunk, a byte now and then.
TOO_SLOW = [
    ("slow_headers", "raise --limit header_seconds", [b"POST /rerank HTTP/1.1\r\nHost: x\r\n"]),
    ("slow_headers", "raise --limit header_seconds", [bytes([byte]) for byte in b"GET /health H"]),
    ("slow_body", "raise --limit transfer_seconds", [head(POST, "Content-Length: 1000") + RERANK]),
    ("slow_body", "raise --limit transfer_seconds", [head(POST, CHUNKED) + b"400\r\n" + RERANK]),
    ("slow_body", "raise --limit transfer_seconds", [head(POST, "Content-Length: 1000"), *[b" "] * 8]),
]


@pytest.mark.parametrize(("reason", "advice", "parts"), TOO_SLOW)
def test_what_is_late_is_a_408(strict_server: Server, reason: str, advice: str, parts: list[bytes]) -> None:
    before = cut(strict_server, reason)
    received = RawClient(strict_server.url).send(*parts, every=0.1).receive()
    assert received.closed
    assert 0.4 < received.seconds < LATE
    assert (received.status, received.error["type"]) == (408, "RequestTimeoutError")
    assert advice in received.error["message"]
    assert received.headers["connection"] == "close"
    assert received.headers["x-request-id"]
    assert cut(strict_server, reason) == before + 1


@pytest.mark.parametrize("answered", [False, True])
def test_an_idle_connection_is_closed_without_a_word(strict_server: Server, answered: bool) -> None:
    client = RawClient(strict_server.url)
    if answered:
        client.send(head("GET /version HTTP/1.1"))
    received = client.receive()
    assert received.closed
    assert (1.4 if answered else 0.4) < received.seconds < LATE
    assert received.data.count(b"HTTP/1.1") == answered


def test_a_connection_that_is_used_stays_open(strict_server: Server) -> None:
    ask = head("GET /health HTTP/1.1")
    received = RawClient(strict_server.url).send(*[ask] * 8, every=0.25).receive()
    assert received.data.count(b"HTTP/1.1 200 OK") == 8


def test_a_body_may_take_as_long_as_its_size_asks_for(strict_server: Server) -> None:
    request = post("/rerank", RERANK.ljust(6_000), "Connection: close")
    # At six times the least rate, more than twice as long as a body may be idle.
    parts = [request[start : start + 600] for start in range(0, len(request), 600)]
    received = RawClient(strict_server.url).send(*parts, every=0.2).receive()
    assert received.seconds > 1.8
    assert received.status == 200


def test_a_client_that_does_not_read_its_answer_is_cut_off(strict_server: Server) -> None:
    # Many short answers have some 10 MB together.
    many = [head("GET /metrics HTTP/1.1") * 1000, post("/nope", RERANK)[:-1]]
    for asked in ([post("/detokenize", LONG_ANSWER)], many):
        before = cut(strict_server, "slow_reader")
        client = RawClient(strict_server.url, receive_buffer=4096).send(*asked)
        wait_for(lambda before=before: cut(strict_server, "slow_reader") == before + 1)
        wait_for(lambda: strict_server.metric("maxsimd_http_connections") == 1)
        # Reset: else the system would hold the answers until the client has read them.
        error = partial(client.socket.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        wait_for(lambda error=error: error() == errno.ECONNRESET)
        client.close()


def test_a_connection_is_reused_after_an_unread_body(strict_server: Server) -> None:
    before = cut(strict_server, "idle")
    request = post("/nope", RERANK)
    parts = [request[:-1], request[-1:], head("GET /health HTTP/1.1")]
    received = RawClient(strict_server.url).send(*parts, every=0.2).receive()
    assert (received.data.count(b"HTTP/1.1 404"), received.data.count(b"HTTP/1.1 200")) == (1, 1)
    assert received.closed
    assert cut(strict_server, "idle") == before + 1


def test_a_client_that_reads_slowly_gets_all_of_its_answer(strict_server: Server) -> None:
    client = RawClient(strict_server.url, receive_buffer=4096)
    client.send(post("/detokenize", LONG_ANSWER, "Connection: close"))
    received = b""
    started = time.monotonic()
    while more := client.socket.recv(1 << 16):
        received += more
        if time.monotonic() < started + 2.4:
            time.sleep(0.02)
    assert time.monotonic() > started + 2
    answer_head, _, body = received.partition(b"\r\n\r\n")
    assert b"200 OK" in answer_head
    assert len(json.loads(body)["text"]) > 1_500_000


@pytest.fixture(scope="module")
def small_server(module_starter: StartServer, bert_cross_encoder: str) -> Server:
    """Few descriptors, little memory for bodies, and much patience."""
    options = ("--limit", "max_bodies_mb=3", "--limit", "transfer_seconds=600")
    return module_starter(bert_cross_encoder, *options, descriptors=64)


@pytest.mark.one_process
def test_the_slowest_reader_is_cut_off_to_free_memory(small_server: Server) -> None:
    server = small_server
    before = cut(server, "evicted")

    def ask() -> RawClient:
        client = RawClient(server.url, receive_buffer=4096).send(post("/detokenize", LONG_ANSWER))
        assert client.socket.recv(15) == b"HTTP/1.1 200 OK"
        return client

    clients = [ask()]
    assert cut(server, "evicted") == before
    for number in (1, 2):
        clients.append(ask())
        assert cut(server, "evicted") == before + number
        received = clients[number - 1].receive()
        assert received.closed
        assert len(received.data) < 3_000_000, "it has not got all of its answer"
    assert httpx.post(server.url + "/rerank", content=RERANK, timeout=600).status_code == 200
    for client in clients:
        client.close()


def _is_served(server: Server) -> bool:
    return httpx.post(server.url + "/rerank", content=RERANK, timeout=600).status_code == 200


@pytest.mark.one_process
def test_more_clients_than_descriptors_shut_nobody_out(small_server: Server) -> None:
    server = small_server
    sending = RawClient(server.url).send(post("/rerank", RERANK)[:-1])
    wait_for(lambda: server.metric("maxsimd_http_in_flight") == 2)
    parts = [b"", b"POST /rerank HTTP/1.1\r\n", post("/rerank", RERANK)[:-1]]
    held = [RawClient(server.url).send(parts[number % 3]) for number in range(80)]
    assert all(_is_served(server) for _ in range(5))
    assert cut(server, "evicted") > 60
    assert server.metric("maxsimd_http_connections") <= 16
    wait_for(lambda: "16 connections are open, the most of --limit max_connections" in server.log)
    answer = sending.receive()
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    for client in held:
        client.close()


@pytest.mark.one_process
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits a process that runs")
def test_a_process_without_descriptors_says_so_and_goes_on(small_server: Server) -> None:
    server = small_server
    assert "cannot accept" not in server.log
    in_use = _descriptors_at_rest(server)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (in_use + 4, 64))
    try:
        held = [RawClient(server.url) for _ in range(12)]
        wait_for(lambda: "cannot accept connections: Too many open files" in server.log)
        assert _is_served(server)
        before = _processor_seconds(server)
        time.sleep(1)
        assert _processor_seconds(server) - before < 0.5, "it must not spin"
        assert server.log.count("cannot accept") == 1
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (64, 64))
    for client in held:
        client.close()


def test_small_requests_are_answered_beside_a_long_text(cross_encoder_server: Server) -> None:
    words = "it was the best of times, it was the worst of times; we had everything before us. "
    times, url = 2_000_000 // len(words), cross_encoder_server.url  # some seconds of tokenising

    def count(text: str) -> int:
        return int(httpx.post(url + "/tokenize", json={"text": text}, timeout=600).json()["count"])

    with ThreadPoolExecutor(1) as threads:
        long, small = threads.submit(count, words * times), 0
        while not long.done():
            assert _is_served(cross_encoder_server)
            small += 1
            time.sleep(0.02)
        assert small > 5, "had they waited for the long text, it would be one or two"
        assert long.result() == 2 + times * (count(words) - 2)


def _descriptors_at_rest(server: Server) -> int:
    """How many descriptors the server has, once connections of earlier tests are closed."""
    counts: list[int] = []

    def is_stable() -> bool:
        counts.append(len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())))
        time.sleep(0.1)
        return len(counts) >= 20 and len(set(counts[-20:])) == 1

    wait_for(is_stable)
    return counts[-1]


def _processor_seconds(server: Server) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
