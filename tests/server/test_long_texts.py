"""Texts of many megabytes: others are answered meanwhile, and memory stays in proportion."""

import re
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server

# Some seconds of tokenising.
MEGABYTES = 4
WORDS = "it was the best of times, it was the worst of times; we had everything before us. "
LONG = WORDS * (MEGABYTES * 10**6 // len(WORDS))


def _tokenize(server: Server, text: str, **options: Any) -> Any:
    response = httpx.post(server.url + "/tokenize", json={"text": text} | options, timeout=300)
    assert response.status_code == 200, response.text[:1000]
    return response.json()


def _memory(server: Server, name: str) -> float:
    """A line of the process's status, in megabytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.exhaustive
def test_a_long_text_takes_memory_in_proportion(cross_encoder_server: Server) -> None:
    """Twenty times the body and 64 MB; as one text, or as lists of tokens, it would take a gigabyte."""
    server = cross_encoder_server
    _tokenize(server, WORDS)
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    before = _memory(server, "VmRSS")
    _tokenize(server, LONG, return_token_strs=True)
    assert _memory(server, "VmHWM") - before < 64 + 20 * MEGABYTES


def test_small_requests_are_answered_beside_a_long_text(cross_encoder_server: Server) -> None:
    server = cross_encoder_server
    answers: list[Any] = []
    long = threading.Thread(target=lambda: answers.append(_tokenize(server, LONG)))
    long.start()
    small = 0
    while long.is_alive():
        assert httpx.get(server.url + "/ready", timeout=60).status_code == 200
        short = _tokenize(server, WORDS)["count"] - 2
        body = {"query": "a", "documents": ["b"]}
        assert httpx.post(server.url + "/rerank", json=body, timeout=60).status_code == 200
        small += 1
    assert small > 5, "had they waited for the long text, it would be one or two"
    assert answers[0]["count"] == len(answers[0]["tokens"]) == 2 + short * (len(LONG) // len(WORDS))
