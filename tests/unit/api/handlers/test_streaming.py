"""/score and /rerank with `stream`: lines as they are ready, and a last one with all that a client needs."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import pytest
import pytest_asyncio

from maxsimd.api.answer import Answer
from maxsimd.api.handlers import handle
from maxsimd.api.state import ServerState
from maxsimd.engine import EngineConfig
from tests.engines import held_steps
from tests.unit.calling_handlers import Caller, Pieces, RecordingEngine
from tests.waiting import until

DOCUMENTS = [f"{i} open the file number {i}, read it and close it" for i in range(60)]
RERANK = {"query": "how is a file opened", "documents": DOCUMENTS}
MANY = RERANK | {"documents": [f"{i} {text}" for i in range(20) for text in DOCUMENTS]}
LONG = "word " * 1_000
SCORE = {"queries": "how is a file opened", "documents": DOCUMENTS}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(bge: str) -> AsyncIterator[RecordingEngine]:
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_batch_tokens": 256, "cache_mb": 0}
    options |= {"model": bge, "score_type": "late-interaction"}
    async with RecordingEngine(EngineConfig(**options)) as engine:
        yield engine


async def _lines(caller: Caller, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await caller.post(path, body | {"stream": True})
    assert answer.status == 200, answer.body
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.splitlines()]


async def test_ranked_and_scored_lines(caller: Caller) -> None:
    whole = await caller.json("/rerank", RERANK)
    *lines, last = await _lines(caller, "/rerank", RERANK)
    assert sorted(line["index"] for line in lines) == list(range(60))
    by_index = {line["index"]: line for line in lines}
    for one in whole["results"]:
        line = by_index[one["index"]]
        assert line["document"] == one["document"]
        assert line["relevance_score"] == pytest.approx(one["relevance_score"], abs=1e-5)
    assert last.keys() == whole.keys()
    assert [one["index"] for one in last["results"]] == [one["index"] for one in whole["results"]]
    assert all(one.keys() == {"index", "relevance_score"} for one in last["results"])
    assert (last["usage"], last["score_scale"]) == (whole["usage"], whole["score_scale"])
    whole = await caller.json("/score", SCORE)
    *lines, last = await _lines(caller, "/v1/score", SCORE)
    scores = {line["index"]: line["score"] for line in lines}
    assert [scores[i] for i in range(60)] == pytest.approx([one["score"] for one in whole["data"]], abs=1e-5)
    assert ([one["index"] for one in last["data"]], last["usage"]) == (list(range(60)), whole["usage"])


async def test_options_of_the_answer(caller: Caller) -> None:
    whole = (await caller.json("/rerank", RERANK))["results"]
    options = {"top_n": 3, "score_threshold": whole[10]["relevance_score"], "return_documents": False}
    *lines, last = await _lines(caller, "/rerank", RERANK | options)
    assert {line["index"] for line in lines} <= {one["index"] for one in whole[:12]}
    assert len(lines) >= 10
    assert all("document" not in line for line in lines)
    assert [one["index"] for one in last["results"]] == [one["index"] for one in whole[:3]]
    *lines, last = await _lines(caller, "/rerank", RERANK | {"explain": True})
    assert all(line["explanation"]["matches"] for line in lines)
    assert not any("explanation" in one for one in last["results"])
    reported = {"documents": ["a", LONG], "long_documents": "error", "on_error": "report"}
    *lines, last = await _lines(caller, "/score", SCORE | reported)
    assert ([line["index"] for line in lines], last["errors"][0]["index"]) == ([0], 1)


async def test_a_bad_request_is_refused_with_a_status(caller: Caller) -> None:
    refuse = {"long_documents": "error"}
    for path, named in (("/rerank", "query"), ("/score", "queries")):
        plain = {named: "q", "documents": ["d"], "stream": True}
        too_long = [{"documents": [LONG]} | refuse, {named: LONG} | refuse]
        for change in ({"documents": []}, *too_long, {"instruction": "x"}):
            await caller.refused(path, plain | change, 400, next(iter(change)))


class _Sink:
    """Notes what is sent and how many bytes are held; fails after `most` parts, as a lost client does."""

    def __init__(self, caller: Caller, most: int = 1_000) -> None:
        self.begun: Answer | None = None
        self.parts, self.held = list[bytes](), list[int]()
        self.has_ended = False
        self._bodies, self._most = caller.state.bodies, most

    async def begin(self, answer: Answer) -> None:
        self.begun = answer

    async def send(self, part: bytes) -> None:
        self.held.append(self._bodies.bytes)
        if len(self.parts) == self._most:
            raise ConnectionResetError
        self.parts.append(part)

    async def end(self) -> None:
        self.has_ended = True


async def _ask(caller: Caller, sink: _Sink, body: dict[str, Any], path: str = "/rerank") -> Answer:
    pieces = Pieces([json.dumps(body | {"stream": True}).encode()])
    return await handle(caller.state, "POST", path, {}, pieces, sink)


async def test_a_client_that_leaves_ends_the_work(caller: Caller, engine: RecordingEngine) -> None:
    sink = _Sink(caller, most=1)
    await _ask(caller, sink, MANY)
    assert not sink.has_ended
    await until(lambda: engine.stats().open_requests == 0 and engine.stats().requests == 0)
    assert (caller.state.is_quiet, caller.state.bodies.bytes) == (True, 0)
    assert caller.metric("maxsimd_http_requests_total", route="/rerank", status="499") == 1


async def test_what_goes_wrong_later_is_the_last_line(caller: Caller, engine: RecordingEngine) -> None:
    sink = _Sink(caller)
    scheduler: Any = engine._running.scheduler  # type: ignore[union-attr]
    with held_steps(engine, after=2):
        asking = asyncio.create_task(_ask(caller, sink, MANY))
        await until(lambda: bool(sink.parts))
        for request_id in [*scheduler._open]:
            scheduler._fail(request_id, "the model failed on it")
    assert ((await asking).status, sink.has_ended) == (500, True)
    assert json.loads(sink.parts[-1])["error"]["message"] == "the model failed on it"
    assert json.loads(sink.parts[0].splitlines()[0])["document"]


@pytest.mark.parametrize("path", ["/rerank", "/invocations"])
async def test_lines_come_one_by_one_while_the_body_and_its_files_are_held(
    caller: Caller, engine: RecordingEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = _Sink(caller)
    monkeypatch.setattr(ServerState, "reads_pictures", True)
    fetched = AsyncMock(side_effect=lambda found, held: held.add(1_000_000) or found)
    monkeypatch.setattr(caller.state.media, "filled", fetched)
    with held_steps(engine, after=2) as go_on:
        asking = asyncio.create_task(_ask(caller, sink, RERANK, path))
        await until(lambda: bool(sink.parts))  # before all is scored
        go_on.set()
        assert (await asking).status == 200
    assert sink.begun is not None
    assert sink.begun.headers["x-request-id"]
    assert (sink.has_ended, len(sink.parts) > 2, caller.state.bodies.bytes) == (True, True, 0)
    assert min(sink.held) > 1_000_000 * fetched.call_count > 0
