"""Answers line by line, from a real server to real clients."""

import json
import signal
import threading
import time

import httpx
import pytest

from tests.server.conftest import Server, StartServer

DOCUMENTS = [f"{i} open the file, read it and close it again " * 12 for i in range(80)]
BODY = {"query": "how is a file opened", "documents": DOCUMENTS, "stream": True, "cache": "bypass"}


@pytest.fixture(scope="module")
def small_steps(module_starter: StartServer) -> Server:
    return module_starter("--dtype", "float32", "--max-batch-tokens", "512", "--log-level", "debug")


def _steps(server: Server) -> float:
    return server.metric("maxsimd_step_tokens_count")


@pytest.mark.exhaustive
def test_the_first_line_comes_before_the_last_document_is_scored(small_steps: Server) -> None:
    before = _steps(small_steps)
    with httpx.stream("POST", small_steps.url + "/rerank", json=BODY, timeout=120) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = answer.iter_lines()
        first = json.loads(next(lines))
        waiting, so_far = small_steps.metric("maxsimd_queue_tokens"), _steps(small_steps) - before
        rest = [json.loads(line) for line in lines]
    steps = _steps(small_steps) - before
    assert first["document"]["text"] == DOCUMENTS[first["index"]]
    assert waiting > 0, "the last document was not scored when the first line came"
    assert 0 < so_far < steps / 2, (so_far, steps)
    *others, last = rest
    assert sorted(one["index"] for one in (first, *others)) == list(range(len(DOCUMENTS)))
    plain = httpx.post(small_steps.url + "/rerank", json=BODY | {"stream": False}, timeout=120).json()
    assert [one["index"] for one in last["results"]] == [one["index"] for one in plain["results"]]
    assert last["usage"] == plain["usage"]


def test_leaving_half_way_frees_the_rest(small_steps: Server) -> None:
    with httpx.stream("POST", small_steps.url + "/rerank", json=BODY, timeout=120) as answer:
        lines = answer.iter_lines()  # that it is forgotten would end the request
        assert next(lines)
        assert small_steps.metric("maxsimd_queue_tokens") > 0
    deadline = time.monotonic() + 20
    while small_steps.metric("maxsimd_queue_tokens") or "POST /rerank 499" not in small_steps.log:
        assert time.monotonic() < deadline, "what nobody waits for is still run"
        time.sleep(0.05)


def test_a_server_that_is_told_to_stop_finishes_its_lines(small_steps: Server) -> None:
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", small_steps.url + "/rerank", json=BODY, timeout=120) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    small_steps.process.send_signal(signal.SIGTERM)
    reader.join()
    assert small_steps.process.wait(timeout=60) == 0
    assert len(lines) == len(DOCUMENTS) + 1
    assert json.loads(lines[-1])["usage"]
