"""Vectors of pictures over HTTP, in the shapes of Cohere's, Voyage's, Jina's and Infinity's clients."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.checkpoints import two_towers, vision_language
from tests.checkpoints.shared import SharedCheckpoints
from tests.server.conftest import Server, StartServer
from tests.server.test_pictures import FIRST, SECOND, base64_of, data_url, post

TEXT = "a photo of two cats"


@pytest.fixture(scope="module")
def clip(module_starter: StartServer, checkpoints: SharedCheckpoints) -> Server:
    return module_starter(checkpoints(two_towers.clip), "--dtype", "float32")


@pytest.fixture(scope="module")
def qwen(module_starter: StartServer, checkpoints: SharedCheckpoints) -> Server:
    return module_starter(checkpoints(vision_language.qwen3_vl_embedding), "--dtype", "float32")


def vectors(server: Server, items: list[Any]) -> NDArray[Any]:
    data = post(server, "/v1/embeddings", input=items)["data"]
    return np.array([each["embedding"] for each in data])


@pytest.fixture(scope="module")
def expected(clip: Server) -> NDArray[Any]:
    """A text's vector and two pictures'."""
    return vectors(clip, [TEXT, {"image": base64_of(FIRST)}, {"image": data_url(SECOND)}])


def test_cohere(clip: Server, expected: NDArray[Any]) -> None:
    body = {
        "images": [data_url(FIRST), data_url(SECOND)],
        "input_type": "image",
        "embedding_types": ["float"],
    }
    for path in ("/v2/embed", "/v1/embed"):
        answer = post(clip, path, **body)
        np.testing.assert_allclose(answer["embeddings"]["float"], expected[1:], atol=1e-5)
        assert answer["texts"] == []
        assert answer["meta"]["billed_units"]["images"] == 2
    content = [{"content": [{"type": "image_url", "image_url": {"url": data_url(SECOND)}}]}]
    inputs = [{"content": [{"type": "text", "text": TEXT}]}, *content]
    answer = post(clip, "/v2/embed", inputs=inputs, input_type="search_document")
    np.testing.assert_allclose(answer["embeddings"]["float"], expected[[0, 2]], atol=1e-5)
    assert (answer["texts"], answer["meta"]["billed_units"]["images"]) == ([TEXT], 1)


def test_voyage(clip: Server, expected: NDArray[Any]) -> None:
    inputs = [
        {"content": [{"type": "text", "text": TEXT}]},
        {"content": [{"type": "image_base64", "image_base64": data_url(FIRST)}]},
        {"content": [{"type": "image_url", "image_url": data_url(SECOND)}]},
    ]
    body = {"inputs": inputs, "input_type": "document"}
    answer = post(clip, "/v1/multimodalembeddings", **body)
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected, atol=1e-5)
    assert answer["usage"]["total_tokens"] > 0
    (encoded, *_) = post(clip, "/v1/multimodalembeddings", **(body | {"output_encoding": "base64"}))["data"]
    rows = np.frombuffer(base64.b64decode(encoded["embedding"]), dtype=np.float32)
    np.testing.assert_allclose(rows, expected[0], atol=1e-5)


def test_infinity(clip: Server, expected: NDArray[Any]) -> None:
    body = {"input": [data_url(FIRST), data_url(SECOND)], "modality": "image"}
    for path in ("/embeddings", "/infinity/embeddings"):
        data = post(clip, path, **body)["data"]
        np.testing.assert_allclose([each["embedding"] for each in data], expected[1:], atol=1e-5)
    one = post(clip, "/embeddings", **(body | {"input": data_url(FIRST)}))["data"]
    np.testing.assert_allclose([each["embedding"] for each in one], expected[1:2], atol=1e-5)


def test_texts_and_pictures_of_one_document_come_together(qwen: Server) -> None:
    """As Voyage's and Jina's clients send them, and vLLM's as a message: the same vector."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(FIRST)}}, {"type": "text", "text": TEXT}]
    (expected,) = vectors(qwen, [{"content": parts}])
    ways = {
        "/v1/multimodalembeddings": {"inputs": [{"content": parts}]},
        "/v1/embeddings": {"input": [{"image": base64_of(FIRST), "text": TEXT}]},
        "/embeddings": {"messages": [{"role": "user", "content": parts}]},
    }
    for path, body in ways.items():
        (found,) = post(qwen, path, **body)["data"]
        np.testing.assert_allclose(found["embedding"], expected, atol=1e-5)
    (swapped,) = vectors(qwen, [{"content": parts[::-1]}])
    assert np.abs(swapped - expected).max() > 1e-3


def test_a_message_of_text_is_read_as_an_input_is(qwen: Server) -> None:
    (expected,) = vectors(qwen, [TEXT])
    for content in (TEXT, [{"type": "text", "text": TEXT}]):
        for option in ({}, {"add_special_tokens": True}):
            messages = [{"role": "user", "content": content}]
            (found,) = post(qwen, "/v1/embeddings", messages=messages, **option)["data"]
            np.testing.assert_allclose(found["embedding"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v2/embed", {"images": ["AAAA"]}, "images", "images[0] is no picture"),
        ("/v2/embed", {"images": [], "texts": ["a"]}, "images", "texts and images exclude each other"),
        ("/v2/embed", {"texts": ["a"], "input_type": "image"}, "input_type", "input_type"),
        ("/embeddings", {"input": [["a"]], "modality": "image"}, "input", "a list of pictures"),
        ("/embeddings", {"input": ["a"], "modality": "audio"}, "modality", "use text or image"),
        ("/v1/multimodalembeddings", {"inputs": []}, "inputs", "inputs is empty"),
        (
            "/v1/multimodalembeddings",
            {"inputs": [{"content": [{"type": "video_url", "video_url": "https://example.com/a.mp4"}]}]},
            "inputs",
            "inputs[0].content[0] is neither a text nor a picture",
        ),
        (
            "/v1/multimodalembeddings",
            {"inputs": ["a", {"content": [{"type": "image_base64", "image_base64": "AAAA"}]}]},
            "inputs",
            "inputs[1] is no picture",
        ),
    ],
)
def test_what_cannot_be_read_is_a_400_that_names_it(
    clip: Server, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    answer = httpx.post(f"{clip.url}{path}", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]
