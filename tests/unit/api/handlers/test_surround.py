"""Surroundings of every request: keys, origins, ids, timing, log lines, metrics, errors and draining."""

import asyncio
import json
import logging
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from maxsimd.api.answer import Answer, as_api_error, error_answer
from maxsimd.api.handlers.handle import OPEN_ROUTES
from maxsimd.api.state import CrossOrigin
from maxsimd.engine import QueueFullError
from tests.engines import held_steps
from tests.unit import calling_handlers
from tests.unit.calling_handlers import GOOD, HEAVY, POSTED, RERANK, Caller, RecordingEngine, error_of
from tests.waiting import until

GUARDED = [one for one in GOOD if one[1] not in OPEN_ROUTES and one not in (("GET", "/"), ("GET", "/docs"))]


async def test_every_guarded_route_needs_one_of_the_keys(engine: RecordingEngine) -> None:
    caller = Caller(engine, api_key=("one", "two", "schlüssel"))
    for method, path in (*GUARDED, ("GET", "/nope"), ("GET", "/rerank")):
        # The third is in Latin 1, the last is a part of a key.
        wrong = ("Bearer three", "Basic one", "Bearer schl\udcfcssel", "Bearer schl")
        for headers in ({}, *({"authorization": each} for each in wrong)):
            answer = await caller.ask(method, path, GOOD.get((method, path)), headers)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), (path, headers)
            assert error_of(answer)["type"] == "AuthenticationError"
    assert engine.calls == []
    for method, path in GUARDED:
        key = "bearer two" if path != "/rerank" else "Bearer schlüssel"
        answer = await caller.ask(method, path, GOOD[method, path], {"authorization": key})
        assert answer.status == (204 if path == "/cache" else calling_handlers.expected(path)), path
    assert set(OPEN_ROUTES) == {"/health", "/ready", "/ping"}
    for path in OPEN_ROUTES:
        assert (await caller.ask("GET", path)).status == 200


UNASKED = {"/tokenize", "/detokenize", "/decode", "/embed_sparse"}


async def test_a_request_is_its_keys_tenants_whatever_it_says(
    engine: RecordingEngine, tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("one name=search weight=2\ntwo name=nightly\nthree\n")
    caller = Caller(engine, api_key_file=str(file), api_key=("four",))
    tenants = {"one": "search", "two": "nightly", "three": "key-2", "four": "key-1"}
    for path in (path for path in POSTED if path not in UNASKED):
        body = GOOD["POST", path] | {"tenant": "search", "user": "search"}
        for key in tenants if path == "/rerank" else ("two",):
            headers = {"authorization": f"Bearer {key}", "x-tenant": "search"}
            assert (await caller.post(path, body, headers)).status == calling_handlers.expected(path)
            assert engine.calls[-1][2]["tenant"] == tenants[key], path
            assert vars(lines.records[-1])["fields"]["tenant"] == tenants[key], path
    await Caller(engine).post("/rerank", RERANK | {"tenant": "search"})
    assert {call[2]["tenant"] for call in engine.calls} == {""}, "without keys there is one tenant"


async def test_nothing_is_read_of_a_tenant_beyond_its_rate(engine: RecordingEngine, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one name=a requests_per_minute=1\ntwo name=b\nnew name=a\n")
    caller = Caller(engine, api_key_file=str(file))
    assert (await caller.post("/rerank", RERANK, {"authorization": "Bearer one"})).status == 200
    headers = {"authorization": "Bearer new"}  # of the same tenant
    body = calling_handlers.Pieces([b"not ", b"read"])
    answer = await caller.post("/rerank", body, headers)
    assert (answer.status, error_of(answer)["type"], body.read) == (429, "RateLimitError", 0)
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert (await caller.post("/tokenize", GOOD["POST", "/tokenize"], headers)).status == 200
    assert (await caller.post("/rerank", RERANK, {"authorization": "Bearer two"})).status == 200


async def test_the_clients_request_id_comes_back_if_it_is_usable(caller: Caller) -> None:
    for given in ("mine-1", "!", "~", "a" * 128):
        for method, path in (("GET", "/health"), ("POST", "/nope"), ("POST", "/rerank")):
            answer = await caller.ask(method, path, b"{", {"x-request-id": given})
            assert answer.headers["x-request-id"] == given
    for given in ("", " ", "a b", "a" * 129, "ä", "a\n", "\x7f", "a\x1f"):
        answers = [await caller.ask("GET", "/health", headers={"x-request-id": given}) for _ in range(2)]
        first, second = [answer.headers["x-request-id"] for answer in answers]
        assert (first != second, len(first)) == (True, 32), given


def _timings(answer: Answer) -> dict[str, float]:
    parts = (part.partition(";dur=") for part in answer.headers["server-timing"].split(", "))
    return {name: float(milliseconds) for name, _, milliseconds in parts}


async def test_every_answer_tells_its_time_and_is_data_for_nobody_else(caller: Caller) -> None:
    for method, path, body in (("POST", "/rerank", RERANK), ("GET", "/nope", b""), ("POST", "/rerank", b"")):
        answer = await caller.ask(method, path, body)
        assert 0 <= _timings(answer)["total"] < 60_000
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert not [name for name in answer.headers if name.startswith("Access-Control")]
    slow = await caller.post("/rerank", HEAVY | {"documents": HEAVY["documents"][:4], "cache": "bypass"})
    timings = _timings(slow)
    counted = caller.metric("maxsimd_http_request_seconds_sum", route="/rerank")
    assert counted is not None
    assert counted * 1000 >= timings["total"] - 0.1
    assert list(timings) == ["queue", "tokenise", "model", "score", "total"]
    assert timings["model"] > 2
    assert timings["tokenise"] > 0
    assert sum(timings.values()) - timings["total"] <= timings["total"] + 1


async def test_every_request_is_logged_and_counted(caller: Caller, lines: pytest.LogCaptureFixture) -> None:
    no_documents = RERANK | {"documents": []}
    for method, path, body, status, level, why in (
        ("POST", "/rerank", RERANK, 200, logging.INFO, ""),
        ("POST", "/rerank", b"{", 400, logging.INFO, " why=BadRequestError"),
        ("POST", "/rerank", no_documents, 400, logging.INFO, " why=BadRequestError:documents"),
        ("DELETE", "/cache", b"", 204, logging.INFO, ""),
        ("HEAD", "/health", b"", 200, logging.DEBUG, ""),
        ("GET", "/nope", b"", 404, logging.DEBUG, " why=NotFoundError"),
    ):
        lines.clear()
        answer = await caller.ask(method, path, body, {"x-request-id": "mine"})
        (line,) = lines.records
        assert (answer.status, line.levelno) == (status, level)
        fields = vars(line)["fields"]
        assert fields.pop("duration_ms") >= 0
        route = {} if path == "/nope" else {"route": path}
        reason = {"reason": why.removeprefix(" why=")} if why else {}
        model = {} if path != "/rerank" or body == b"{" else {"model": "all-MiniLM-L6-v2"}
        told = {"method": method, "path": path, "route": "unknown", "status": status}
        label = route.get("route", "unknown")
        assert caller.metric("maxsimd_http_requests_total", route=label, status=str(status))
        assert caller.metric("maxsimd_http_request_seconds_count", route=label)
        assert fields == told | {"request_id": "mine"} | route | model | reason
        start, _, rest = line.getMessage().partition(f"{method} {path} {status} ")
        assert start == ""
        milliseconds, _, end = rest.partition(" ms ")
        assert (float(milliseconds), end) == (_timings(answer)["total"], f"id=mine{why}")
    lines.clear()
    await caller.ask("POST", "/\n20:00:00 ERROR " + "x" * 1000)
    (record,) = lines.records
    assert record.getMessage().startswith("POST /\\n20:00:00%20ERROR%20" + "x" * 83 + "... 404 ")


HERE = "https://here.example"
PREFLIGHT = {"origin": HERE, "access-control-request-method": "POST"}


async def test_pages_of_named_origins_alone_may_read_answers(caller: Caller) -> None:
    for answer in (
        await caller.ask("POST", "/rerank", RERANK, {"origin": HERE}),
        await caller.ask("OPTIONS", "/rerank", headers=PREFLIGHT),
    ):
        assert not [name for name in answer.headers if name.startswith("Access-Control") or name == "Vary"]
    assert answer.status == 405
    caller = Caller(caller.engine, cors_origin=(HERE, "https://there.example"))
    for path, body, status in (("/rerank", RERANK, 200), ("/rerank", b"{", 400), ("/nope", b"", 404)):
        answer = await caller.ask("POST", path, body, {"origin": HERE})
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (status, HERE)
        exposed = {*answer.headers["Access-Control-Expose-Headers"].lower().split(", ")}
        assert {"x-request-id", *(name for name in answer.headers if name.startswith("x-maxsimd"))} <= exposed
        assert answer.headers["Vary"] == "Origin"
    page = await caller.ask("GET", "/docs")
    assert page.headers["Vary"] == "Accept-Encoding, Origin"
    assert (await caller.ask("HEAD", "/docs")).body is page.body, "decompressed once"
    for origin in ("https://else.example", "http://here.example", "null", ""):
        other = await caller.ask("POST", "/nope", b"", {"origin": origin})
        assert "Access-Control-Allow-Origin" not in other.headers, origin
        assert other.headers["Vary"] == "Origin"


async def test_no_page_reads_answers_by_a_name_pointed_at_loopback(engine: RecordingEngine) -> None:
    caller = Caller(engine, cors_origin=("https://there.example:8000",))
    named = "127.0.0.1:8000 [::1]:8000 x localhost:80 app.localhost host.docker.internal there.example:8000"
    for on_loopback, host in product((True, False), ("evil.example", "evil.example:80", *named.split())):
        caller.state.is_on_loopback = on_loopback
        answer = await caller.ask("POST", "/rerank", RERANK, {"host": host})
        assert answer.status == (403 if on_loopback and "evil" in host else 200), host


async def test_a_browser_may_ask_without_a_key_whether_it_may_ask(engine: RecordingEngine) -> None:
    caller = Caller(engine, cors_origin=(HERE,), api_key=("one",))
    headers = PREFLIGHT | {"access-control-request-headers": "authorization, content-type, x-stainless-os"}
    answer = await caller.ask("OPTIONS", "/rerank", headers=headers)
    assert (answer.status, answer.body, answer.headers["Access-Control-Allow-Origin"]) == (204, b"", HERE)
    assert answer.headers["Access-Control-Allow-Methods"] == "DELETE, GET, HEAD, POST"
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization, content-type, x-stainless-os"
    assert answer.headers["Access-Control-Max-Age"] == "600"
    elsewhere = PREFLIGHT | {"origin": "https://else.example"}
    for refused in (elsewhere, {"access-control-request-method": "POST"}, {"origin": HERE}):
        assert (await caller.ask("OPTIONS", "/rerank", headers=refused)).status == 401
    assert (await caller.ask("POST", "/rerank", RERANK, PREFLIGHT)).status == 401


async def test_a_star_is_all_origins_and_only_names_are_repeated() -> None:
    everyone = CrossOrigin(("*",))
    headers = everyone.headers("https://any.example")
    assert (headers["Access-Control-Allow-Origin"], "Vary" in headers) == ("*", False), headers
    assert everyone.preflight("OPTIONS", PREFLIGHT, ("GET",)) is not None
    for names in ("x\r\nSet-Cookie: a=b", "x;y", "", "x" * 1001):
        headers = PREFLIGHT | {"access-control-request-headers": names}
        answer = CrossOrigin((HERE,)).preflight("OPTIONS", headers, ("GET",))
        assert answer is not None
        assert "Access-Control-Allow-Headers" not in answer.headers


BUSY = "the server is starting or shutting down; try again shortly"
DEAD = "the engine has died and the server must be restarted"
RESTARTING = "the engine has failed and is being restarted; send the request again shortly"


async def test_an_error_is_answered_counted_and_logged(engine: Any, monkeypatch: Any, lines: Any) -> None:
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
    caller: Caller, engine: RecordingEngine, lines: pytest.LogCaptureFixture, path: str, body: Any
) -> None:
    before = engine.cancelled
    await engine.clear_cache()
    with held_steps(engine):
        request = asyncio.create_task(caller.post(path, body))
        await until(lambda: engine.queued_tokens > 0)
        assert caller.metric("maxsimd_http_in_flight") == 1
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await until(lambda: engine.queued_tokens == 0)
    assert (engine.cancelled, caller.metric("maxsimd_http_in_flight")) == (before + 1, 0)
    assert caller.metric("maxsimd_http_requests_total", route=path, status="499") == 1
    assert f"POST {path} 499 " in lines.records[-1].getMessage()
    with held_steps(engine):
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
    assert (caller.engine.calls, await _probe(caller)) == ([], (200, 503, "draining"))


async def _probe(caller: Caller) -> tuple[int, int, str]:
    health, ready = await caller.ask("GET", "/health"), await caller.ask("GET", "/ready")
    assert (caller.metric("maxsimd_ready"), health.body) == (ready.status == 200, ready.body)
    assert ready.headers.get("Retry-After") == (None if ready.status == 200 else "5")
    assert "Retry-After" not in health.headers
    assert ready.headers["Content-Type"] == "application/json; charset=utf-8"
    return health.status, ready.status, json.loads(health.body)["status"]


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
    caller.state.comes_back, caller.state.closing = False, True
    assert (await _probe(caller), await _refusal(caller)) == ((503, 503, "dead"), (503, "30", DEAD))
