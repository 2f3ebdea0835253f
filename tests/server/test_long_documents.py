"""What is done with long documents, and instructions, over HTTP."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import language_models
from tests.server.conftest import Server, StartServer

FILLER = "the weather was fair and nothing happened on that day " * 60
DOCUMENTS = [FILLER, FILLER + "Paris is the capital of France.", FILLER + FILLER]


def post(server: Server, path: str, body: Any, status: int = 200) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
def test_windows_find_what_cutting_misses(server: Server, path: str) -> None:
    body = {"query": "What is the capital of France?", "documents": DOCUMENTS}
    read = post(server, path, body | {"long_documents": "window"})
    cut = post(server, path, body)
    assert read["results"][0]["index"] == 1
    assert "warnings" not in read
    assert "cut" in cut["warnings"][0]
    assert read["usage"]["prompt_tokens"] > cut["usage"]["prompt_tokens"]


def test_score_takes_windows_too_and_cuts_without(server: Server) -> None:
    body = {"queries": "What is the capital of France?", "documents": DOCUMENTS}
    scores = [item["score"] for item in post(server, "/score", body | {"long_documents": "window"})["data"]]
    assert scores.index(max(scores)) == 1
    refused = post(server, "/score", body | {"long_documents": "error"}, status=400)
    assert refused["error"]["param"] == "documents"
    assert len(post(server, "/score", body)["warnings"]) == 1
    small = body | {"long_documents": "window", "truncate_prompt_tokens": 100, "window_overlap": 10}
    assert len(post(server, "/score", small)["data"]) == 3


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"long_documents": "all"}, "long_documents"),
        ({"window_overlap": -1}, "window_overlap"),
        ({"instruction": 3}, "instruction"),
        ({"instruction": "be kind"}, "instruction"),
    ],
)
def test_settings_that_make_no_sense_are_refused(server: Server, change: Any, param: str) -> None:
    body = {"query": "q", "documents": ["d"]} | change
    assert post(server, "/rerank", body, status=400)["error"]["param"] == param


def test_a_server_can_read_all_documents_through_windows(
    start_server: StartServer, bert_cross_encoder: str
) -> None:
    server = start_server(bert_cross_encoder, "--long-documents", "window", "--window-overlap", "16")
    body = {"query": "What is the capital of France?", "documents": DOCUMENTS}
    assert "warnings" not in post(server, "/rerank", body)
    texts = {"query": body["query"], "texts": DOCUMENTS}
    assert len(post(server, "/rerank", texts)) == 3


def test_an_instruction_reaches_the_model(start_server: StartServer, folder: Path) -> None:
    checkpoint = language_models.qwen3_reranker(folder / "served-qwen3-reranker")
    server = start_server(checkpoint, "--dtype", "float32", "--instruction", "find what is about snakes")
    body = {"query": "python", "documents": ["a snake", "a language"]}

    def scores(**options: str) -> list[float]:
        results = post(server, "/rerank", body | options)["results"]
        return [item["relevance_score"] for item in sorted(results, key=lambda item: item["index"])]

    flagged = scores()
    assert scores(instruction="find what is about snakes") == pytest.approx(flagged, abs=1e-6)
    assert scores(instruction="find what is about programs") != pytest.approx(flagged, abs=1e-4)


def test_a_prompt_can_be_named(start_server: StartServer, folder: Path) -> None:
    from tests.checkpoints import bi_encoders

    server = start_server(bi_encoders.nomic(folder / "served-nomic"), "--dtype", "float32")
    named = post(server, "/v1/embeddings", {"input": "a text", "prompt_name": "clustering"})
    written = post(server, "/v1/embeddings", {"input": "clustering: a text"})
    ours, expected = (answer["data"][0]["embedding"] for answer in (named, written))
    assert ours == pytest.approx(expected, abs=1e-6)
    refused = post(server, "/v1/embeddings", {"input": "a", "prompt_name": "nope"}, status=400)
    assert "clustering" in refused["error"]["message"]
