"""Errors, cancellation, timeouts and draining, without a web server."""

import asyncio
import json
from typing import Any
from unittest.mock import AsyncMock

import pytest

from maxsimd.api.failures import as_api_error, error_answer
from maxsimd.engine import QueueFullError
from tests.unit.calling_handlers import GOOD, HEAVY, POSTED, RERANK, Caller, RecordingEngine, error_of
from tests.waiting import until

BUSY = "the server is starting or shutting down; try again shortly"
DEAD = "the engine has died and the server must be restarted"
RESTARTING = "the engine has failed and is being restarted; send the request again shortly"


async def test_an_error_is_answered_counted_and_logged(
    engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    """What each class of error is answered with: `tests/unit/api/test_failures.py`."""
    for error, status in ((QueueFullError("full", 1.2), 429), (RuntimeError("inside"), 500)):
        caller = Caller(engine)
        lines.clear()
        monkeypatch.setattr(engine, "rerank", AsyncMock(side_effect=error))
        answer = await caller.post("/rerank", RERANK, {"x-request-id": "mine"})
        plain = error_answer(as_api_error(error))
        assert (answer.status, answer.body) == (status, plain.body)
        assert answer.headers.items() >= plain.headers.items()
        assert caller.metric("maxsimd_http_requests_total", route="/rerank", status=str(status)) == 1
        logged = [record for record in lines.records if record.exc_info]
        assert len(logged) == (status == 500)
        for record in logged:
            assert record.getMessage() == "request mine failed"
            assert record.exc_info is not None
            assert record.exc_info[1] is error


# A heavy request to each method of the engine.
HEAVY_REQUESTS: list[tuple[str, Any]] = [
    ("/rerank", {"query": "q", "texts": HEAVY["documents"]}),
    ("/score", {"queries": "q", "documents": HEAVY["documents"]}),
    ("/v1/embeddings", {"input": HEAVY["documents"]}),
    ("/pooling", {"input": HEAVY["documents"], "dimensions": 16}),
]


@pytest.mark.parametrize(("path", "body"), HEAVY_REQUESTS)
async def test_what_is_cancelled_or_late_is_not_worked_on(
    engine: RecordingEngine, lines: pytest.LogCaptureFixture, path: str, body: Any
) -> None:
    caller = Caller(engine)
    before = engine.cancelled
    await engine.clear_cache()
    request = asyncio.create_task(caller.post(path, body))
    await until(lambda: engine.queued_tokens > 0)
    assert caller.metric("maxsimd_http_in_flight") == 1
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await until(lambda: engine.queued_tokens == 0)
    assert engine.cancelled == before + 1
    assert caller.metric("maxsimd_http_in_flight") == 0
    assert caller.metric("maxsimd_http_requests_total", route=path, status="499") == 1
    assert f"POST {path} 499 " in lines.records[-1].getMessage()

    status, error = await caller.error(path, body | {"timeout": 0.02})
    assert (status, error["type"]) == (504, "TimeoutError")
    assert error["message"] == "not done within 0.02 seconds; allow more time or send fewer documents"
    await until(lambda: engine.queued_tokens == 0)
    assert engine.cancelled == before + 2


async def _refusal(caller: Caller, method: str = "POST", path: str = "/rerank") -> tuple[int, str, str]:
    answer = await caller.ask(method, path, GOOD[method, path])
    return answer.status, answer.headers["Retry-After"], error_of(answer)["message"]


async def test_a_draining_server_refuses_work_on_every_route(caller: Caller) -> None:
    caller.state.closing = True
    for path in POSTED:
        assert await _refusal(caller, "POST", path) == (503, "5", BUSY), path
    assert caller.engine.calls == []


async def _probe(caller: Caller) -> tuple[int, int, str]:
    health, ready = await caller.ask("GET", "/health"), await caller.ask("GET", "/ready")
    assert caller.metric("maxsimd_ready") == (ready.status == 200)
    assert health.body == ready.body
    assert ready.headers.get("Retry-After") == (None if ready.status == 200 else "5")
    assert "Retry-After" not in health.headers
    assert ready.headers["Content-Type"] == "application/json; charset=utf-8"
    return health.status, ready.status, json.loads(health.body)["status"]


async def test_probes_see_a_drain_and_work_in_flight_finishes(engine: RecordingEngine) -> None:
    caller = Caller(engine)
    await engine.clear_cache()
    body = HEAVY | {"documents": HEAVY["documents"][:6], "cache": "bypass"}
    requests = [asyncio.create_task(caller.post("/rerank", body)) for _ in range(2)]
    await until(lambda: caller.metric("maxsimd_http_in_flight") == 2)
    await until(lambda: engine.queued_tokens > 0)
    caller.state.closing = True
    quiet = asyncio.create_task(caller.state.until_quiet())
    assert await _probe(caller) == (200, 503, "draining")
    assert (await caller.post("/rerank", RERANK)).status == 503
    assert not quiet.done()
    requests[0].cancel()
    await asyncio.gather(requests[0], return_exceptions=True)
    await asyncio.sleep(0)
    assert not quiet.done(), "the other request is in flight"
    answer = await requests[1]
    assert answer.status == 200
    await asyncio.wait_for(quiet, 120)


async def test_a_server_that_starts_answers_probes_only() -> None:
    caller = Caller(RecordingEngine())
    assert await _probe(caller) == (200, 503, "starting")
    for method, path in (("POST", "/rerank"), ("GET", "/v1/models"), ("DELETE", "/cache")):
        assert await _refusal(caller, method, path) == (503, "5", BUSY)
    for path in ("/version", "/metrics"):
        assert (await caller.ask("GET", path)).status == 200


async def test_a_dead_engine_says_when_to_retry(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _probe(caller) == (200, 200, "ok")
    monkeypatch.setattr(caller.engine, "death", "of old age")
    caller.state.comes_back = True
    assert await _probe(caller) == (200, 503, "restarting")
    for method, path in (("POST", "/rerank"), ("GET", "/v1/models"), ("DELETE", "/cache")):
        assert await _refusal(caller, method, path) == (503, "5", RESTARTING)
    caller.state.comes_back = False
    caller.state.closing = True
    assert await _probe(caller) == (503, 503, "dead")
    assert await _refusal(caller) == (503, "30", DEAD)
