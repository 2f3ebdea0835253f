"""Pictures over HTTP: the shapes in which clients send them, where they may come from, what is refused."""

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.checkpoints import visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.server.conftest import Server, StartServer


def file_of(seed: int, size: tuple[int, int] = (80, 60), kind: str = "PNG") -> bytes:
    random = np.random.default_rng(seed)
    image = Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


FIRST, SECOND = file_of(1), file_of(2)


def base64_of(file: bytes) -> str:
    return base64.b64encode(file).decode()


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64_of(file)}"


@pytest.fixture(scope="module")
def media_host() -> Iterator[str]:
    """A web server with two pictures."""
    files = {"/first.png": FIRST, "/second.png": SECOND}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = files.get(self.path)
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "image/png")
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def media_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "first.png").write_bytes(FIRST)
    return folder


@pytest.fixture(scope="module")
def pages(
    module_starter: StartServer, checkpoints: SharedCheckpoints, media_host: str, media_dir: Path
) -> Server:
    return module_starter(
        checkpoints(visual.colpali),
        *("--dtype", "float32", "--served-model-name", "pages", "--max-images", "8"),
        *("--allowed-media-host", media_host, "--allowed-media-dir", str(media_dir)),
    )


def post(server: Server, path: str, **body: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(server: Server, path: str, **body: Any) -> str:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code in (400, 413), response.text
    return str(response.json()["error"]["message"])


def score_of(server: Server, document: Any, query: Any = "what is this?") -> float:
    answer = post(server, "/score", queries=query, documents=[document])
    return float(answer["data"][0]["score"])


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_picture_scores_the_same_in_every_shape(pages: Server, media_host: str, media_dir: Path) -> None:
    url, again = data_url(FIRST), base64_of(FIRST)
    shapes: list[Any] = [
        {"content": [image_part(url)]},
        {"content": [{"type": "image_url", "image_url": url}]},
        {"content": [{"type": "input_image", "image_url": url}]},
        {"content": [{"type": "image_base64", "image_base64": again}]},
        {"content": [{"image": again}]},
        {"image": url},
        {"image": again},
        {"image": {"url": url}},
        image_part(url),
        {"image_url": url},
        {"image": f"{media_host}/first.png"},
        {"content": [image_part(f"{media_host}/first.png")]},
        {"image": (media_dir / "first.png").as_uri()},
        {"image": data_url(file_of(1, kind="BMP"))},
    ]
    scores = [score_of(pages, shape) for shape in shapes]
    assert len(set(scores)) == 1
    assert score_of(pages, {"image": data_url(SECOND)}) != scores[0]


def test_vllms_documented_request_scores_each_picture(pages: Server, media_host: str) -> None:
    answer = post(
        pages,
        "/score",
        model="pages",
        text_1="slm markdown",
        text_2={
            "content": [
                {"type": "image_url", "image_url": {"url": f"{media_host}/first.png"}},
                {"type": "image_url", "image_url": {"url": f"{media_host}/second.png"}},
            ]
        },
    )
    alone = [score_of(pages, {"image": data_url(file)}, "slm markdown") for file in (FIRST, SECOND)]
    assert [one["score"] for one in answer["data"]] == pytest.approx(alone, rel=1e-6, abs=1e-5)
    assert answer["usage"]["total_tokens"] > 0


def test_vllms_rerank_takes_texts_and_pictures_together(pages: Server, media_host: str) -> None:
    documents = [
        "a plain text",
        {"content": [{"type": "image_url", "image_url": {"url": f"{media_host}/first.png"}}]},
        {"content": [{"type": "text", "text": "a part"}]},
    ]
    answer = post(pages, "/rerank", model="pages", query="slm markdown", documents=documents)
    assert sorted(one["index"] for one in answer["results"]) == [0, 1, 2]
    for one in answer["results"]:
        alone = score_of(pages, documents[one["index"]], "slm markdown")
        assert one["relevance_score"] == pytest.approx(alone, rel=1e-6, abs=1e-5)
    texts = {one["index"]: one.get("document") for one in answer["results"]}
    assert texts[0] == {"text": "a plain text"}
    assert "base64" not in str(answer)


def test_jinas_documented_request_is_answered(pages: Server, media_host: str) -> None:
    answer = post(
        pages,
        "/v1/rerank",
        model="pages",
        query="small language model data extraction",
        documents=[
            {"image": f"{media_host}/first.png"},
            {"image": f"{media_host}/second.png"},
            {"image": base64_of(SECOND)},
            {"text": "The corporate world of extraction"},
        ],
        return_documents=False,
    )
    scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert scores[1] == pytest.approx(scores[2], rel=1e-6, abs=1e-5)
    assert len(scores) == 4


def test_a_picture_may_be_the_query(pages: Server) -> None:
    query = {"content": [image_part(data_url(FIRST))]}
    answer = post(pages, "/rerank", query=query, documents=["a text", {"image": data_url(SECOND)}])
    assert len(answer["results"]) == 2


def test_pictures_are_embedded_from_inputs_and_from_messages(pages: Server) -> None:
    picture = {"image": data_url(FIRST)}
    of_input = post(pages, "/v1/multi-vector", input=["a text", picture], encoding_format="float")
    messages = [{"role": "user", "content": [image_part(data_url(FIRST))]}]
    of_messages = post(pages, "/pooling", messages=messages)
    vectors = np.array(of_input["data"][1]["embeddings"])
    assert np.allclose(vectors, np.array(of_messages["data"][0]["data"]), atol=1e-5)
    assert vectors.shape[0] == of_messages["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"image": "http://example.com/a.png"}, "documents[1] is at http://example.com, from where"),
        ({"image": "https://127.0.0.1/a.png"}, "from where this server fetches nothing"),
        ({"image": "http://169.254.169.254/latest/meta-data"}, "from where this server fetches nothing"),
        ({"image": "file:///etc/passwd"}, "documents[1] is a file outside of the folder"),
        ({"image": "data:image/png;base64,AAAA"}, "documents[1] is no picture that can be read"),
        ({"image": "data:text/html;base64,AAAA"}, "documents[1] is of the media type text/html"),
        ({"image": "/etc/passwd"}, "documents[1] is no picture that can be read"),
        ({"image": ""}, "documents[1] has no picture"),
        ({"image": 7}, "documents[1] has no picture"),
        ({"content": [image_part("ftp://a")]}, "documents[1].content[0] has a URL that cannot be read"),
        ({"content": [{"type": "video_url", "video_url": {"url": "a"}}]}, "is neither a text nor a picture"),
        ({"content": [{"type": "image_embeds", "image_embeds": "A"}]}, "is neither a text nor a picture"),
        ({"content": ["a text", {"image": data_url(FIRST)}]}, "has 1 picture and 1 text; this model reads"),
        ({"image": data_url(FIRST[:-40])}, "documents[1] cannot be read: its file is damaged"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(pages: Server, document: Any, message: str) -> None:
    said = refusal(pages, "/rerank", query="what?", documents=["a text", document])
    assert message in said
    assert post(pages, "/rerank", query="what?", documents=["a text"])["results"]


def test_an_unreadable_picture_is_reported_beside_scores(pages: Server) -> None:
    documents = [{"image": data_url(FIRST)}, {"image": "http://example.com/a.png"}, "a text"]
    answer = post(pages, "/rerank", query="what?", documents=documents, on_error="report")
    assert {one["index"] for one in answer["results"]} == {0, 2}
    assert [error["index"] for error in answer["errors"]] == [1]
    assert "fetches nothing" in answer["errors"][0]["error"]


def test_more_pictures_than_a_request_may_have_are_refused(pages: Server) -> None:
    said = refusal(pages, "/rerank", query="what?", documents=[{"image": data_url(FIRST)}] * 9)
    assert "has 9 pictures, and one may have 8" in said


def test_sagemakers_route_has_the_same_limits_and_sources(pages: Server, media_host: str) -> None:
    said = refusal(pages, "/invocations", query="what?", documents=[{"image": data_url(FIRST)}] * 9)
    assert "has 9 pictures, and one may have 8" in said
    documents = [{"image": f"{media_host}/first.png"}]
    answer = post(pages, "/invocations", query="what?", documents=documents)
    assert answer["results"][0]["relevance_score"] == pytest.approx(score_of(pages, documents[0], "what?"))


def test_a_model_of_texts_says_that_it_reads_no_pictures(server: Server) -> None:
    document = {"image": data_url(FIRST)}
    for path, body in {
        "/rerank": {"query": "what?", "documents": ["a text", document]},
        "/score": {"queries": "what?", "documents": ["a text", document]},
        "/v1/embeddings": {"input": ["a text", document]},
    }.items():
        assert "[1] is a picture; this model reads only text" in refusal(server, path, **body)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--allowed-media-host", "http://", "names no host"),
        ("--allowed-media-dir", "/no/such/folder", "is no folder"),
    ],
)
def test_a_source_that_makes_no_sense_ends_the_start(
    start_server: StartServer, option: str, value: str, message: str
) -> None:
    server = start_server(option, value, ready=False)
    assert server.process.wait(timeout=60) == 1
    assert message in server.log


def test_the_event_loop_goes_on_while_large_pictures_are_read(pages: Server) -> None:
    photograph = base64_of(file_of(7, (4000, 3000), "JPEG"))
    # Its first reading loads what reads pictures.
    score_of(pages, {"image": base64_of(FIRST)})
    # Written here: this process, too, has but one event loop.
    documents = [{"image": photograph}] * 4
    body = json.dumps({"queries": "what?", "documents": documents, "cache": "bypass"})

    async def run() -> tuple[list[float], float]:
        times = []
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=pages.url, timeout=120) as client:
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
