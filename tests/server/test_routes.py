"""Routes over HTTP, real clients, and what is logged."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.clients.page import CURL, URL, examples, printed, run
from tests.documentation.test_code_blocks import blocks_of
from tests.server.conftest import Server
from tests.waiting import wait_for


def post(server: Server, path: str, body: Any, status: int = 200) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=600)
    assert response.status_code == status, response.text
    return response.json()


def test_no_text_is_logged_and_unusual_text_does_no_harm(server: Server) -> None:
    documents = ["", " ", "\x00", "🙂" * 50, "漢字 עברית العربية", "a" * 20_000, "\n\t", "a very secret text"]
    body = {
        "query": "a secret question", "documents": documents, "user": "me", "timeout": None, "texts": None,
    }  # fmt: skip
    assert len(post(server, "/rerank", body)["results"]) == len(documents)
    post(server, "/rerank", body | {"top_n": -1}, 400)
    wait_for(lambda: "POST /rerank 400" in server.log)
    assert "secret" not in server.log


def test_openais_client_gets_embeddings(server: Server) -> None:
    from openai import OpenAI  # which takes a second, in each worker if at the top

    with OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=["hello world", "another"])
        short = client.embeddings.create(model="all-MiniLM-L6-v2", input="hello world", dimensions=64)
        assert [model.id for model in client.models.list()] == ["all-MiniLM-L6-v2"]
    vectors = np.array([item.embedding for item in answer.data])
    assert vectors.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)
    cut = vectors[0, :64] / np.linalg.norm(vectors[0, :64])
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-4)
    assert answer.usage.prompt_tokens == 4 + 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_examples_for_curl_are_answered(server: Server, tmp_path: Path) -> None:
    ranked, embedded = (
        json.loads(printed(example, "sh", server.url, os.environ, tmp_path)) for example in examples(CURL)
    )
    assert [result["index"] for result in ranked["results"]] == [1, 2]
    assert len(embedded["data"]) == 2
    for block in blocks_of("sh"):
        if block.text.startswith("curl"):
            script = block.text.replace(URL, server.url)
            answer = json.loads(run(["sh", "-c", script], os.environ, tmp_path, 60))
            assert "error" not in answer, f"{block}: {answer}"


def test_normalized_changes_no_vector_of_muvera(colbert_server: Server) -> None:
    body = {"input": ["Paris is a city."], "encoding": "muvera", "input_type": "document"}
    plain = post(colbert_server, "/v1/embeddings", body)
    assert post(colbert_server, "/v1/embeddings", {**body, "normalized": True})["data"] == plain["data"]
    assert np.linalg.norm(plain["data"][0]["embedding"]) > 1.1
