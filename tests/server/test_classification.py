"""The routes that classify, over HTTP."""

from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder

from tests.server.conftest import Server, StartServer


@pytest.fixture(scope="module")
def classifier(module_starter: StartServer, three_label_classifier: str) -> Server:
    return module_starter(three_label_classifier, "--dtype", "float32")


def post(server: Server, path: str, body: Any, status: int = 200) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


def _probabilities(checkpoint: str, *texts: Any) -> np.ndarray:
    model = CrossEncoder(checkpoint, device="cpu")
    features = model.tokenizer(*texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        return torch.softmax(model.model(**features).logits, dim=-1).numpy()


def test_classify_gives_probabilities_with_labels(classifier: Server, three_label_classifier: str) -> None:
    answer = post(classifier, "/classify", {"input": ["some text", "another one"]})
    expected = _probabilities(three_label_classifier, ["some text", "another one"])
    assert answer["object"] == "list"
    assert answer["usage"]["prompt_tokens"] == 8
    for item, row in zip(answer["data"], expected, strict=True):
        np.testing.assert_allclose(item["probs"], row, atol=1e-5)
        assert item["label"] == f"LABEL_{row.argmax()}"
        assert item["num_classes"] == 3
    logits = post(classifier, "/classify", {"input": "some text", "use_activation": False})["data"][0][
        "probs"
    ]
    assert sum(logits) != pytest.approx(1)


def test_predict_answers_as_tei_does(classifier: Server, three_label_classifier: str) -> None:
    one = post(classifier, "/predict", {"inputs": "some text"})
    assert [item["score"] for item in one] == sorted((item["score"] for item in one), reverse=True)
    expected = _probabilities(three_label_classifier, ["some text"])[0]
    assert {item["label"]: pytest.approx(item["score"], rel=1e-6, abs=1e-5) for item in one} == {
        f"LABEL_{i}": value for i, value in enumerate(expected.tolist())
    }
    many = post(classifier, "/predict", {"inputs": [["some text"], ["another"]]})
    assert many[0][0]["score"] == pytest.approx(one[0]["score"], abs=1e-6)
    pair = post(classifier, "/predict", {"inputs": ["a premise", "a hypothesis"]})
    expected = _probabilities(three_label_classifier, ["a premise"], ["a hypothesis"])[0]
    assert max(item["score"] for item in pair) == pytest.approx(expected.max(), rel=1e-6, abs=1e-5)
    assert len(post(classifier, "/predict", {"inputs": [["a premise", "a hypothesis"]]})) == 1


def test_a_classifier_of_three_labels_does_not_score(classifier: Server) -> None:
    answer = post(classifier, "/score", {"queries": "a", "documents": ["b"]}, status=400)
    assert "3 labels" in answer["error"]["message"]
    assert "/classify" in answer["error"]["message"]
