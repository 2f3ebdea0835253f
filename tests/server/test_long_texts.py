"""Texts of many megabytes: others are answered meanwhile, and memory stays in proportion."""

import re
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server, StartServer

# Some seconds of tokenising.
MEGABYTES = 4
WORDS = "it was the best of times, it was the worst of times; we had everything before us. "
LONG = WORDS * (MEGABYTES * 10**6 // len(WORDS))


@pytest.fixture(scope="module")
def roomy(module_starter: StartServer) -> Server:
    """Takes bodies of any length."""
    return module_starter("--dtype", "float32")


def post(server: Server, path: str, body: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=300)
    assert response.status_code == 200, response.text[:1000]
    return response.json()


def _memory(server: Server, name: str) -> float:
    """A line of the process's status, in megabytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.exhaustive
def test_a_long_text_takes_memory_in_proportion(roomy: Server) -> None:
    """Twenty times the body and 64 MB; as one text, or as lists of tokens, it would take a gigabyte."""
    post(roomy, "/tokenize", {"text": WORDS})
    Path(f"/proc/{roomy.process.pid}/clear_refs").write_text("5")
    before = _memory(roomy, "VmRSS")
    post(roomy, "/tokenize", {"text": LONG, "return_token_strs": True})
    assert _memory(roomy, "VmHWM") - before < 64 + 20 * MEGABYTES


def test_small_requests_are_answered_beside_a_long_text(roomy: Server) -> None:
    answers: list[Any] = []
    long = threading.Thread(target=lambda: answers.append(post(roomy, "/tokenize", {"text": LONG})))
    long.start()
    small = 0
    while long.is_alive():
        assert httpx.get(roomy.url + "/ready", timeout=60).status_code == 200
        assert post(roomy, "/tokenize", {"text": "a word"})["count"] == 4
        assert len(post(roomy, "/rerank", {"query": "a", "documents": ["b"]})["results"]) == 1
        small += 1
    long.join()
    assert small > 5, "had they waited for the long text, it would be one or two"
    assert answers[0]["count"] == len(answers[0]["tokens"]) == 2 + 20 * (len(LONG) // len(WORDS))


def test_a_long_document_that_is_cut_scores_like_its_beginning(roomy: Server) -> None:
    def scores(document: str) -> list[float]:
        answer = post(
            roomy, "/rerank", {"query": "times", "documents": [document], "return_documents": False}
        )
        assert "cut" in answer["warnings"][0]
        return [result["relevance_score"] for result in answer["results"]]

    assert scores(LONG) == scores(WORDS * 100)
