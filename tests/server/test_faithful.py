"""A Stanford ColBERT checkpoint's scores over HTTP are those of the reference."""

import httpx
import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder

from maxsimd.bench.datasets import Pair
from tests.server.conftest import Server, StartServer


@pytest.fixture(scope="module")
def colbert(module_starter: StartServer, stanford_colbert: str) -> Server:
    return module_starter(stanford_colbert, "--dtype", "float32")


def _score(server: Server, query: str, documents: list[str]) -> np.ndarray:
    body = {"queries": query, "documents": documents, "truncate_prompt_tokens": -1}
    response = httpx.post(server.url + "/score", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return np.array([item["score"] for item in response.json()["data"]])


def test_score_equals_multi_vector_encoder(colbert: Server, stanford_colbert: str, pairs: list[Pair]) -> None:
    documents = [pair.document for pair in pairs[:50]]
    model = MultiVectorEncoder(stanford_colbert, device="cpu")
    for pair in pairs[:3]:
        reference = model.similarity(model.encode_query([pair.query]), model.encode_document(documents))[0]
        np.testing.assert_allclose(_score(colbert, pair.query, documents), reference.numpy(), atol=1e-4)
