"""Routes, methods and answers, without a web server."""

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from maxsimd.api import answer as answers
from maxsimd.api.handlers.operating import MODEL_PATH
from maxsimd.api.handlers.routes import ROUTES
from maxsimd.engine import EngineConfig
from maxsimd.engine.runtime import Running
from tests.unit.calling_handlers import (
    GOOD,
    POSTED,
    RERANK,
    Caller,
    RecordingEngine,
    error_of,
    expected,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[RecordingEngine]:
    async with RecordingEngine(EngineConfig(dtype="float32", threads=1)) as engine:
        yield engine


@pytest.fixture
def caller(engine: RecordingEngine) -> Caller:
    return Caller(engine, max_body_mb=1, max_documents=10)


async def test_every_route_has_a_request_here() -> None:
    offered = {(method, path) for path, methods in ROUTES.items() for method in methods if path != MODEL_PATH}
    assert offered == {*GOOD, *(("HEAD", path) for method, path in GOOD if method == "GET")}


@pytest.mark.parametrize(("method", "path"), GOOD)
async def test_every_route_answers_a_good_request(caller: Caller, method: str, path: str) -> None:
    answer = await caller.ask(method, path, GOOD[method, path])
    assert answer.status == (204 if path == "/cache" else expected(path))


@pytest.mark.parametrize("path", [path for method, path in GOOD if method == "GET"])
async def test_head_gets_what_get_does(caller: Caller, path: str) -> None:
    answer = await caller.ask("HEAD", path)
    assert answer.status == 200
    if path not in ("/metrics", "/v1/models", "/models"):  # which differ from call to call
        assert answer.body == (await caller.ask("GET", path)).body


@pytest.mark.parametrize(
    "path",
    ["/nope", "//", "", "*", "//rerank", "/v3/score", "/v1%2Fscore", "/RERANK", "/v1", "/v1/v1/v1/score"],
)
async def test_an_unknown_path_is_a_404(caller: Caller, path: str) -> None:
    answer = await caller.post(path, RERANK)
    assert answer.status == 404
    assert error_of(answer) == {
        "message": "there is no such route; GET /docs has those there are",
        "type": "NotFoundError",
        "param": None,
        "code": 404,
    }


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        *((path, "POST") for path in POSTED if path != "/"),
        *((path, "GET, HEAD") for method, path in GOOD if method == "GET" and path != "/"),
        ("/", "GET, HEAD, POST"),
        ("/cache", "DELETE"),
    ],
)
async def test_a_wrong_method_is_a_405_that_names_the_right_ones(
    caller: Caller, path: str, allowed: str
) -> None:
    for method in {"GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"} - set(allowed.split(", ")):
        answer = await caller.ask(method, path)
        assert (answer.status, answer.headers["Allow"]) == (405, allowed)
        assert error_of(answer) == {
            "message": f"this route takes {allowed}",
            "type": "MethodNotAllowedError",
            "param": None,
            "code": 405,
        }


ANSWERS = [(499, 0, False), (500, 0, False), (501, 0, True), (1, 100_199, False), (1, 100_200, True)]


@pytest.mark.parametrize(("items", "characters", "in_thread"), ANSWERS)
async def test_large_answers_are_encoded_in_a_thread(items: int, characters: int, in_thread: bool) -> None:
    threads = []

    def build() -> list[float]:
        threads.append(threading.get_ident())
        return [1.5] * items

    answer = await answers.wire_answer(build, items, characters)
    assert [thread != threading.get_ident() for thread in threads] == [in_thread]
    assert json.loads(answer.body) == [1.5] * items
    assert (answer.status, answer.headers) == (200, {"Content-Type": "application/json"})


# Each route with a body, and how many items its answer has, or as much text as that many items.
ITEMS: list[tuple[str, Any, int]] = [
    ("/score", {"queries": "q", "documents": ["d"] * 501}, 501),
    ("/rerank", {"query": "q", "documents": ["d"] * 501}, 501),
    ("/rerank", {"query": "q", "documents": ["d " * 500] * 9}, 45),
    ("/rerank", {"query": "q", "documents": ["d " * 500] * 9, "return_documents": False}, 9),
    ("/rerank", {"query": "q", "documents": ["d " * 500] * 9, "top_n": 2}, 10),
    ("/rerank", {"query": "q", "texts": ["d"] * 501}, 501),
    ("/rerank", {"query": "q", "texts": ["d " * 500] * 9, "return_text": True}, 45),
    ("/rerank", {"query": "q", "texts": ["d " * 500] * 9}, 9),
    ("/v1/embeddings", {"input": ["a", "b"]}, 768),
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 250}, 500),
    ("/pooling", {"input": ["a"], "dimensions": 167}, 501),
    ("/detokenize", {"tokens": [1037] * 501}, 10),
]


@pytest.mark.parametrize(("path", "body", "items"), ITEMS)
async def test_every_route_says_how_large_its_answer_is(
    caller: Caller, path: str, body: Any, items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(caller.engine)
    given = []

    async def aside(function: Any, work: int) -> Any:
        given.append(work)
        return function()

    monkeypatch.setattr(answers, "aside", aside)
    await caller.json(path, body)
    assert given == [items]


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, body, items in ITEMS if items > 500])
async def test_what_was_computed_is_answered_though_the_engine_has_died_since(
    engine: RecordingEngine, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(engine)
    work = Running.run

    async def die(running: Running, *arguments: Any) -> Any:
        result = await work(running, *arguments)
        monkeypatch.setattr(engine, "death", "of old age")
        return result

    monkeypatch.setattr(Running, "run", die)
    assert (await caller.post(path, body)).status == 200
    assert (await caller.post(path, body)).status == 503
