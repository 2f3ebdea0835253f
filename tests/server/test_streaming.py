"""Answers line by line, and clients that leave."""

import json
import signal
import threading

import httpx
import pytest

from tests.server.conftest import Server, StartServer
from tests.server.raw_client import RawClient, post
from tests.waiting import wait_for

DOCUMENTS = [f"{i} open the file, read it and close it again " * 12 for i in range(40)]
BODY = {"query": "how is a file opened", "documents": DOCUMENTS, "stream": True, "cache": "bypass"}


@pytest.fixture(scope="module")
def small_steps(module_starter: StartServer) -> Server:
    return module_starter("--dtype", "float32", "--max-batch-tokens", "512", "--log-level", "debug")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_request_along(small_steps: Server, stream: bool) -> None:
    def has_work() -> bool:
        return small_steps.metric("maxsimd_queue_tokens") > 0

    before = small_steps.log.count("POST /rerank 499")
    cancelled = small_steps.metric("maxsimd_cancelled_requests_total")
    if stream:
        with httpx.stream("POST", small_steps.url + "/rerank", json=BODY, timeout=120) as answer:
            lines = answer.iter_lines()  # that it is forgotten would end the request
            assert next(lines)
            assert has_work()
    else:
        client = RawClient(small_steps.url).send(
            post("/rerank", json.dumps(BODY | {"stream": False}).encode())
        )
        wait_for(has_work)
        client.close()
    wait_for(lambda: not has_work() and small_steps.log.count("POST /rerank 499") == before + 1)
    assert small_steps.metric("maxsimd_cancelled_requests_total") == cancelled + 1


def test_a_server_that_is_told_to_stop_finishes_its_lines(small_steps: Server) -> None:
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = BODY | {"documents": DOCUMENTS[:16]}
        with httpx.stream("POST", small_steps.url + "/rerank", json=body, timeout=120) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    small_steps.process.send_signal(signal.SIGTERM)
    reader.join()
    assert small_steps.process.wait(timeout=60) == 0
    *scored, last = map(json.loads, lines)
    assert sorted(one["index"] for one in scored) == list(range(16))
    assert last["usage"]
