"""How a server starts and ends, and what becomes of the answers to clients that leave."""

import fcntl
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.conftest import ON_RAY, Server, StartServer, slow_steps
from tests.server.raw_client import RawClient, post
from tests.waiting import wait_for

# Takes far longer than any grace period here.
HEAVY = {"query": "q", "documents": [f"{i} " + "word " * 245 for i in range(600)], "return_documents": False}


def _answers(server: Server) -> bool:
    try:
        return httpx.get(server.url + "/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.not_on_ray  # where nobody answers until the model is loaded
def test_a_server_that_is_loading_ends_at_once(start_server: StartServer) -> None:
    server = start_server(ready=False)
    wait_for(lambda: _answers(server))
    assert server.terminate() == 0
    assert "stopped while loading" in server.log


def _close_standard_files_and_read_no_log() -> None:
    os.close(0)
    os.close(1)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.dup2(writing, 2)
    fcntl.fcntl(reading, fcntl.F_DUPFD, 10)
    os.close(reading)
    os.close(writing)


@pytest.mark.not_on_ray  # which reads what its processes write
def test_a_server_without_standard_files_serves_and_ends(start_server: StartServer) -> None:
    server = start_server("--log-level", "debug", before=_close_standard_files_and_read_no_log)
    with httpx.Client(base_url=server.url) as client:
        assert {client.post("/rerank", json={}).status_code for _ in range(100)} == {400}
    assert server.terminate() == 0


def test_requests_longer_than_the_grace_period_get_a_503(start_server: StartServer) -> None:
    options = ("--grace-seconds", "1", "--max-batch-tokens", "512")
    server = start_server(*options, before=None if ON_RAY else slow_steps)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(httpx.post, server.url + "/rerank", json=HEAVY, timeout=600)
        wait_for(lambda: server.metric("maxsimd_queue_tokens") > 0)
        asked = time.monotonic()
        assert server.terminate() == 0
        # A second of grace, once, and some to end a step and to free what there is; then Ray ends, too.
        assert 1 < time.monotonic() - asked < (60 if ON_RAY else 20)
    response = answer.result()
    assert response.status_code == 503
    assert ON_RAY or response.headers["connection"] == "close", "connections are Ray's own there"
    assert response.headers["retry-after"]
    assert response.json()["error"]["type"] == "ServiceUnavailableError"


DOCUMENTS = [f"{i} open the file, read it and close it again " * 12 for i in range(40)]
BODY = {"query": "how is a file opened", "documents": DOCUMENTS, "stream": True, "cache": "bypass"}


@pytest.fixture(scope="module")
def small_steps(module_starter: StartServer) -> Server:
    options = ("--dtype", "float32", "--max-batch-tokens", "512", "--log-level", "debug")
    return module_starter(*options, before=None if ON_RAY else slow_steps)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_request_along(small_steps: Server, stream: bool) -> None:
    def has_work() -> bool:
        return small_steps.metric("maxsimd_queue_tokens") > 0

    before = small_steps.log.count("POST /rerank 499")
    cancelled = small_steps.metric("maxsimd_cancelled_requests_total")
    if stream:
        with httpx.stream("POST", small_steps.url + "/rerank", json=BODY, timeout=600) as answer:
            lines = answer.iter_lines()  # that it is forgotten would end the request
            assert next(lines)
            assert has_work()
    else:
        body = json.dumps(BODY | {"stream": False}).encode()
        client = RawClient(small_steps.url).send(post("/rerank", body))
        wait_for(has_work)
        client.close()
    wait_for(lambda: not has_work() and small_steps.log.count("POST /rerank 499") == before + 1)
    assert small_steps.metric("maxsimd_cancelled_requests_total") > cancelled, "each replica counts its part"


def test_a_server_that_is_told_to_stop_finishes_its_lines(small_steps: Server) -> None:
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = BODY | {"documents": DOCUMENTS[:16]}
        with httpx.stream("POST", small_steps.url + "/rerank", json=body, timeout=600) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(600)
    small_steps.process.send_signal(signal.SIGTERM)
    reader.join()
    assert small_steps.process.wait(timeout=600) == 0
    *scored, last = map(json.loads, lines)
    assert sorted(one["index"] for one in scored) == list(range(16))
    assert last["usage"]
