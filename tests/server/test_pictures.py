"""Pictures over HTTP: the shapes in which clients send them, where they may come from, what is refused."""

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.checkpoints import two_towers, vision_language, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.server.conftest import Server, StartServer, web_server

TEXT = "a photo of two cats"


def file_of(seed: int, size: tuple[int, int] = (80, 60), kind: str = "PNG") -> bytes:
    random = np.random.default_rng(seed)
    image = Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


FILE = file_of(1)
FIRST, SECOND = data_url(FILE), data_url(file_of(2))


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def media_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "first.png").write_bytes(FILE)
    return folder


@pytest.fixture(scope="module")
def media_host(media_dir: Path) -> Iterator[str]:
    with web_server(partial(SimpleHTTPRequestHandler, directory=str(media_dir))) as url:
        yield url


@pytest.fixture(scope="module")
def pages(
    module_starter: StartServer, checkpoints: SharedCheckpoints, media_host: str, media_dir: Path
) -> Server:
    return module_starter(
        *(checkpoints(visual.colpali), "--dtype", "float32", "--limit", "max_images=8"),
        *("--allowed-media-host", media_host, "--allowed-media-dir", str(media_dir)),
    )


@pytest.fixture(scope="module")
def clip(module_starter: StartServer, checkpoints: SharedCheckpoints) -> Server:
    return module_starter(checkpoints(two_towers.clip), "--dtype", "float32")


@pytest.fixture(scope="module")
def qwen(module_starter: StartServer, checkpoints: SharedCheckpoints) -> Server:
    return module_starter(checkpoints(vision_language.qwen3_vl_embedding), "--dtype", "float32")


def post(server: Server, path: str, **body: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=600)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(server: Server, path: str, **body: Any) -> str:
    response = httpx.post(server.url + path, json=body, timeout=600)
    assert response.status_code in (400, 413), response.text
    return str(response.json()["error"]["message"])


def score_of(server: Server, document: Any) -> float:
    answer = post(server, "/score", queries="what is this?", documents=[document])
    return float(answer["data"][0]["score"])


def test_a_picture_scores_the_same_from_everywhere(pages: Server, media_host: str, media_dir: Path) -> None:
    shapes: list[Any] = [
        {"content": [part(FIRST)]}, {"image": FIRST.partition(",")[2]},
        {"content": [part(f"{media_host}/first.png")]}, {"image": (media_dir / "first.png").as_uri()},
        {"image": data_url(file_of(1, kind="BMP"))},
    ]  # fmt: skip
    scores = [score_of(pages, shape) for shape in shapes]
    assert len(set(scores)) == 1
    assert score_of(pages, {"image": SECOND}) != scores[0]


def test_texts_and_pictures_are_ranked_together(pages: Server) -> None:
    documents = ["a text", {"content": [part(FIRST)]}, {"content": [{"type": "text", "text": "a part"}]}]
    alone = [score_of(pages, document) for document in documents]
    for path in ("/rerank", "/invocations"):
        answer = post(pages, path, query="what is this?", documents=documents)
        found = {one["index"]: one["relevance_score"] for one in answer["results"]}
        assert found == pytest.approx(dict(enumerate(alone)), rel=1e-6, abs=1e-5)
        assert "base64" not in str(answer)
    query = {"content": [part(FIRST)]}
    assert len(post(pages, "/rerank", query=query, documents=["a text", {"image": SECOND}])["results"]) == 2


def test_pictures_are_embedded_from_inputs_and_from_messages(pages: Server) -> None:
    of_input = post(pages, "/v1/multi-vector", input=["a text", {"image": FIRST}], encoding_format="float")
    of_messages = post(pages, "/pooling", messages=[{"role": "user", "content": [part(FIRST)]}])
    vectors = np.array(of_input["data"][1]["embeddings"])
    np.testing.assert_allclose(vectors, of_messages["data"][0]["data"], atol=1e-5)
    assert vectors.shape[0] == of_messages["usage"]["prompt_tokens"]


def test_what_cannot_be_read_is_refused_by_its_name(pages: Server) -> None:
    for document, message in (
        ({"image": "http://example.com/a.png"}, "documents[1] is at http://example.com, from where"),
        ({"image": "file:///etc/passwd"}, "documents[1] is a file outside of the folder"),
        ({"image": "/etc/passwd"}, "documents[1] is no picture that can be read"),
        ({"image": 7}, "documents[1] has no picture"),
        ({"content": [part("ftp://a")]}, "documents[1].content[0] has a URL that cannot be read"),
        ({"content": ["a text", {"image": FIRST}]}, "has 1 picture and 1 text; this model reads"),
        ({"image": data_url(FILE[:-40])}, "documents[1] cannot be read: its file is damaged"),
    ):
        assert message in refusal(pages, "/rerank", query="what?", documents=["a text", document])
    said = refusal(pages, "/rerank", query="what?", documents=[{"image": FIRST}] * 9)
    assert "has 9 pictures, and one may have 8" in said
    documents = [{"image": FIRST}, {"image": "http://example.com/a.png"}, "a text"]
    answer = post(pages, "/rerank", query="what?", documents=documents, on_error="report")
    assert {one["index"] for one in answer["results"]} == {0, 2}
    assert [error["index"] for error in answer["errors"]] == [1]


def test_a_model_of_texts_says_that_it_reads_no_pictures(server: Server) -> None:
    texts = ["a text", {"image": FIRST}]
    for path, body in {
        "/rerank": {"query": "what?", "documents": texts},
        "/score": {"queries": "what?", "documents": texts},
        "/v1/embeddings": {"input": texts},
    }.items():
        assert "[1] is a picture; this model reads only text" in refusal(server, path, **body)


def test_the_event_loop_goes_on_while_large_pictures_are_read(pages: Server) -> None:
    # Its first reading loads what reads pictures.
    score_of(pages, {"image": FIRST})
    # Written here: this process, too, has but one event loop.
    documents = [{"image": data_url(file_of(7, (4000, 3000), "JPEG"))}] * 4
    body = json.dumps({"queries": "what?", "documents": documents, "cache": "bypass"})

    async def run() -> tuple[list[float], float]:
        times = []
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=pages.url, timeout=600) as client:
            began = loop.time()
            large = [asyncio.create_task(client.post("/score", content=body)) for _ in range(2)]
            while not all(task.done() for task in large):
                before = loop.time()
                assert (await client.get("/health")).status_code == 200
                times.append(loop.time() - before)
                await asyncio.sleep(0.005)
            assert [task.result().status_code for task in large] == [200, 200]
        return times, loop.time() - began

    times, whole = asyncio.run(run())
    assert len(times) > 10
    assert max(times) < whole / 2, "somebody waited for the pictures"


def vectors(server: Server, path: str, **body: Any) -> NDArray[Any]:
    answer = post(server, path, **body)
    if "embeddings" in answer:
        return np.array(answer["embeddings"]["float"])
    return np.array([each["embedding"] for each in answer["data"]])


def test_vectors_are_the_same_for_every_vendors_client(clip: Server) -> None:
    expected = vectors(clip, "/v1/embeddings", input=[TEXT, {"image": FIRST}, {"image": SECOND}])
    contents = [[{"type": "text", "text": TEXT}], [part(FIRST)], [part(SECOND)]]
    inputs = [{"content": content} for content in contents]
    cohere = {"images": [FIRST, SECOND], "input_type": "image", "embedding_types": ["float"]}
    infinity = {"input": [FIRST, SECOND], "modality": "image"}
    for path, rows, body in (
        ("/v1/embed", expected[1:], cohere),
        ("/v2/embed", expected[1:], cohere),
        ("/v2/embed", expected, {"inputs": inputs, "input_type": "search_document"}),
        ("/v1/multimodalembeddings", expected, {"inputs": inputs, "input_type": "document"}),
        ("/embeddings", expected[1:], infinity),
        ("/infinity/embeddings", expected[1:], infinity),
        ("/embeddings", expected[1:2], infinity | {"input": FIRST}),
    ):
        np.testing.assert_allclose(vectors(clip, path, **body), rows, atol=1e-5, err_msg=path)
    assert post(clip, "/v2/embed", **cohere)["meta"]["billed_units"]["images"] == 2


def test_texts_and_pictures_of_one_document_come_together(qwen: Server) -> None:
    parts = [part(FIRST), {"type": "text", "text": TEXT}]
    expected = vectors(qwen, "/v1/embeddings", input=[{"content": parts}])
    ways: dict[str, dict[str, Any]] = {
        "/v1/multimodalembeddings": {"inputs": [{"content": parts}]},
        "/v1/embeddings": {"input": [{"image": FIRST, "text": TEXT}]},
        "/embeddings": {"messages": [{"role": "user", "content": parts}]},
    }
    for path, body in ways.items():
        np.testing.assert_allclose(vectors(qwen, path, **body), expected, atol=1e-5)
    swapped = vectors(qwen, "/v1/embeddings", input=[{"content": parts[::-1]}])
    assert np.abs(swapped - expected).max() > 1e-3
    of_text = vectors(qwen, "/v1/embeddings", input=TEXT)
    of_message = vectors(qwen, "/v1/embeddings", messages=[{"role": "user", "content": TEXT}])
    np.testing.assert_allclose(of_message, of_text, atol=1e-5)


def test_pictures_that_cannot_be_embedded_are_refused(clip: Server) -> None:
    video = {"type": "video_url", "video_url": "https://example.com/a.mp4"}
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("/v2/embed", {"images": ["AAAA"]}, "images[0] is no picture"),
        ("/v2/embed", {"images": [], "texts": ["a"]}, "texts and images exclude each other"),
        ("/embeddings", {"input": [["a"]], "modality": "image"}, "a list of pictures"),
        ("/embeddings", {"input": ["a"], "modality": "audio"}, "use text or image"),
        ("/v1/multimodalembeddings", {"inputs": []}, "inputs is empty"),
        ("/v1/multimodalembeddings", {"inputs": [{"content": [video]}]}, "is neither a text nor a picture"),
    ]
    for path, body, words in bad:
        assert words in refusal(clip, path, **body)
