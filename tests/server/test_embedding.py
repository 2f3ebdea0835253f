"""The routes that give vectors, over HTTP and with OpenAI's own client."""

from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from tests.server.conftest import Server


def post(server: Server, path: str, body: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_openais_client_gets_embeddings(server: Server) -> None:
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


def test_pooled_token_vectors_give_the_score(server: Server) -> None:
    query, document = (
        np.array(post(server, "/pooling", {"input": text, "input_type": kind})["data"][0]["data"])
        for text, kind in (("what is it", "query"), ("it is a thing", "document"))
    )
    answer = post(server, "/score", {"queries": "what is it", "documents": "it is a thing"})
    assert answer["data"][0]["score"] == pytest.approx((query @ document.T).max(axis=1).sum(), abs=1e-4)


def test_pooling_on_a_cross_encoder_classifies(cross_encoder_server: Server) -> None:
    answer = post(cross_encoder_server, "/pooling", {"input": ["some text"]})
    assert np.array(answer["data"][0]["data"]).shape == (1,)
    refused = httpx.post(cross_encoder_server.url + "/v1/embeddings", json={"input": "a"})
    assert refused.status_code == 400
    assert "cannot embed; it can classify" in refused.json()["error"]["message"]


def test_text_goes_to_tokens_and_back(server: Server) -> None:
    answer = post(server, "/tokenize", {"text": "Hello world", "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == 4
    assert answer["token_strs"] == ["[CLS]", "hello", "world", "[SEP]"]
    assert answer["max_model_len"] == 256
    back = post(server, "/detokenize", {"tokens": answer["tokens"]})
    assert "hello world" in back["text"]
