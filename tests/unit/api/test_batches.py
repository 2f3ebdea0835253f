"""Batch jobs: their files, the order of their lives, and what bounds them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from maxsimd.api import batches
from maxsimd.api.answer import Answer, ApiError
from maxsimd.api.batches import Batch, BatchStore, run_batches
from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.handlers import handle, watch
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine
from tests.unit.calling_handlers import Pieces

SCORES = "/v1/score"


def line(name: str, **more: Any) -> bytes:
    return json.dumps(
        {"custom_id": name, "method": "POST", "url": SCORES, "body": {"n": name}} | more
    ).encode()


LINES = [line(f"r{i}") for i in range(40)]


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(tmp_path / "jobs", ServerConfig(batch_mb=4, max_body_mb=1))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_SECONDS", "_LEAST_WAIT"):
        monkeypatch.setattr(batches, name, 0.01)


def begun(store: BatchStore, lines: list[bytes], tenant: str = "a") -> Batch:
    path = store.new_path()
    path.write_bytes(b"\n".join(lines))
    return store.add_batch(tenant, SCORES, store.add_file(tenant, path, "in").id, None)


@asynccontextmanager
async def running(store: BatchStore, ask: Callable[..., Any]) -> AsyncIterator[None]:
    jobs = asyncio.create_task(run_batches(store, ask, lambda: True))
    try:
        yield
    finally:
        jobs.cancel()
        await asyncio.gather(jobs, return_exceptions=True)


async def ended(store: BatchStore, batch: Batch, tenant: str = "a") -> Batch:
    async with asyncio.timeout(600):
        while not (found := store.batch(tenant, batch.id)).is_over:
            await asyncio.sleep(0.01)
    return found


def results(store: BatchStore, id: str | None, tenant: str = "a") -> dict[str, Any]:
    found = [] if id is None else store.path_of(tenant, id).read_text().splitlines()
    assert len({json.loads(each)["custom_id"] for each in found}) == len(found), "each once"
    return {(result := json.loads(each))["custom_id"]: result for each in found}


async def answer(tenant: str, path: str, body: bytes) -> Answer:
    return Answer(200, {}, body)


async def test_a_job_goes_on_where_it_was_left(store: BatchStore) -> None:
    asked: list[str] = []

    async def some(tenant: str, path: str, body: bytes) -> Answer:
        if len(asked) >= 20:
            await asyncio.sleep(3600)
        asked.append(json.loads(body)["n"])
        return Answer(400 if asked[-1] == "r3" else 200, {}, body)

    batch = begun(store, [*LINES, b"  "])
    async with running(store, some):
        while len(asked) < 20:
            await asyncio.sleep(0.01)
    output, _ = store.results(batch)
    with output.open("ab") as file:
        file.write(b'{"custom_id": "r3')  # it breaks off
    async with running(store, answer):
        whole = await ended(store, batch)
    counts = whole.request_counts
    assert (whole.status, counts.total, counts.completed, counts.failed) == ("completed", 40, 39, 1)
    right, wrong = results(store, whole.output_file_id), results(store, whole.error_file_id)
    assert (len(right), [*wrong]) == (39, ["r3"])
    assert right["r7"]["response"]["body"] == {"priority": "batch", "n": "r7"}
    assert wrong["r3"]["response"]["status_code"] == 400


async def test_requests_without_room_are_sent_again(store: BatchStore) -> None:
    refused: set[bytes] = set()

    async def busy(tenant: str, path: str, body: bytes) -> Answer:
        if body not in refused:
            refused.add(body)
            return Answer(429 if len(refused) % 2 else 503, {"Retry-After": "0"})
        return Answer(200, {}, body)

    batch = begun(store, LINES[:8])
    async with running(store, busy):
        assert (await ended(store, batch)).request_counts.completed == 8


async def test_jobs_end_early(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(tenant: str, path: str, body: bytes) -> Answer:
        return Answer(429, {})

    cancelled, late = begun(store, LINES), begun(store, LINES, "b")
    async with running(store, never):
        while store.batch("a", cancelled.id).status != "in_progress":
            await asyncio.sleep(0.01)
        assert store.cancel("a", cancelled.id).status == "cancelling"
        assert (await ended(store, cancelled)).cancelled_at is not None
        now = time.time() + batches.WINDOW_SECONDS + 1
        monkeypatch.setattr(time, "time", lambda: now)
        over = await ended(store, late, "b")
    assert over.status == "expired"
    errors = results(store, over.error_file_id, "b")
    assert len(errors) == 40
    assert errors["r0"]["error"]["code"] == "batch_expired"
    with pytest.raises(ApiError, match="cancelled already"):
        store.cancel("a", cancelled.id)


async def test_a_tenant_has_only_so_much(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def long(tenant: str, path: str, body: bytes) -> Answer:
        full = await asyncio.to_thread(store.room, tenant) < 0
        return Answer(429 if full else 200, {}, b'"' + b"x" * 200_000 + b'"')

    with store.uploading("a", 7) as one, store.uploading("a", 7) as another:
        one(5)
        with pytest.raises(ApiError, match="batch_mb"):
            another(3)
    batch = begun(store, LINES)
    async with running(store, long):
        over = await ended(store, batch)
    assert over.errors is not None
    assert (over.status, over.errors.data[0].code) == ("failed", "quota_exceeded")
    assert 0 < over.request_counts.completed < 40
    assert store.room("a") < 0 < store.room("b")
    monkeypatch.setattr(batches, "_MOST_KEPT", 2)
    with pytest.raises(ApiError, match="you have 2 files"):
        begun(store, LINES)
    now = time.time() + 31 * 86_400
    monkeypatch.setattr(time, "time", lambda: now)
    store.drop_expired()
    assert (store.files("a"), store.batches("a")) == ([], [])


async def test_two_processes_share_the_jobs(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job has one claim, a tenant has two at a time, and others get their turn."""
    jobs = [begun(store, LINES[:2]) for _ in range(3)] + [begun(store, LINES[:2], "b")]
    first, second, other, none = [store.claim() for _ in range(4)]
    assert first
    assert second
    assert other
    assert none is None
    assert [each.batch.id for each in (first, second, other)] == [jobs[0].id, jobs[1].id, jobs[3].id]
    store.cancel("a", jobs[2].id)
    cancelled = store.claim()
    assert cancelled
    assert cancelled.batch.id == jobs[2].id, "it ends at once"
    now = time.time() + batches._SILENT_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: now)
    taken = store.claim()
    assert taken
    assert taken.batch.id == jobs[2].id
    for act in (store.keep_alive, lambda claim: store.finish(claim, "completed")):
        with pytest.raises(batches.LostClaimError):
            act(cancelled)


async def test_a_job_ends_whatever_becomes_of_its_files(store: BatchStore) -> None:
    async def binary(tenant: str, path: str, body: bytes) -> Answer:
        return Answer(200, {"Content-Type": "application/octet-stream"}, b"\n\xff")

    gone, strange, wrong = begun(store, LINES, "b"), begun(store, LINES[:2]), begun(store, [b"{"])
    with pytest.raises(ApiError, match="still reads this file"):
        store.delete_file("b", gone.input_file_id)
    store.path_of("b", gone.input_file_id).unlink()
    store.cancel("a", wrong.id)
    async with running(store, binary):
        assert (await ended(store, wrong)).status == "cancelled"
        over = await ended(store, strange)
        assert {each["error"]["code"] for each in results(store, over.error_file_id).values()} == {"not_json"}
        lost = await ended(store, gone, "b")
    assert lost.errors is not None
    assert (lost.status, lost.errors.data[0].code) == ("failed", "missing_file")
    store.delete_file("a", strange.input_file_id)


@pytest.mark.parametrize(("lines", "reason"), [
    ([], "has no lines"), ([b"{"], "not a request"), ([LINES[0], LINES[0]], "in an earlier line"),
    ([line("a", method="GET")], "method must be POST"), ([line("a", url="/rerank")], "url must be"),
    ([line("a", body={"stream": True})], "stream must be false"), ([b"[" * 5000], "not a request"),
    ([line("a", body=[])], "not a request"), ([b'"' + b"x" * (2 << 20)], "longer than a request"),
])  # fmt: skip
async def test_wrong_files_fail_before_they_run(store: BatchStore, lines: list[bytes], reason: str) -> None:
    batch = begun(store, lines)
    async with running(store, answer):
        over = await ended(store, batch)
    assert over.errors is not None
    assert (over.status, over.output_file_id) == ("failed", None)
    assert reason in over.errors.data[0].message


async def test_jobs_over_http_belong_to_their_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one name=a\ntwo name=b\nthree\n")

    async def ask(method: str, path: str, key: str = "one", body: bytes = b"") -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}"}
        found = await handle(state, method, path, headers, Pieces([body[:100], body[100:]]), None)
        return found.status, json.loads(found.body.splitlines()[0])

    def form(content: bytes, **fields: str) -> bytes:
        request = httpx.Request("POST", "http://a", files={"file": ("in.jsonl", content)}, data=fields)
        return bytes(request.read())

    rerank = {"query": "q", "documents": ["a", "b"]}
    lines = [json.dumps({"custom_id": "1", "method": "POST", "url": "/rerank", "body": rerank}).encode()]
    async with Engine() as engine:
        config = ServerConfig(api_key_file=str(keys), batch_dir=str(tmp_path / "jobs"), batch_mb=1)
        state = ServerState(engine, config)
        whole = form(lines[0], purpose="batch")
        status, file = await ask("POST", "/v1/files", body=whole)
        assert (status, file["filename"], file["bytes"]) == (200, "in.jsonl", len(lines[0]))
        strange = whole.replace(b'filename="in.jsonl"', b"filename*=unicode_escape'x'%5Cud800")
        assert (await ask("POST", "/v1/files", body=strange))[1]["filename"] == "?"
        idna = whole.replace(b'filename="in.jsonl"', b"filename*=idna'x'a")
        for wrong in (
            idna,
            b"",
            b"junk",
            whole[:-30],
            whole.replace(b'name="file"', b'name="fil"'),
            form(b"x"),
        ):
            assert (await ask("POST", "/v1/files", body=wrong))[0] == 400, wrong
        job = {"input_file_id": file["id"], "endpoint": "/rerank", "completion_window": "24h"}
        long = {"a": "x" * 20_000}
        for more in ({"endpoint": "/tokenize"}, {"completion_window": "1h"}, {"metadata": long}):
            assert (await ask("POST", "/v1/batches", body=json.dumps(job | more).encode()))[0] == 400
        _, batch = await ask("POST", "/v1/batches", body=json.dumps(job).encode())
        watching = asyncio.create_task(watch(state))
        async with asyncio.timeout(600):
            while batch["status"] != "completed":
                await asyncio.sleep(0.05)
                _, batch = await ask("GET", f"/v1/batches/{batch['id']}")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        _, result = await ask("GET", f"/v1/files/{batch['output_file_id']}/content")
        assert len(result["response"]["body"]["results"]) == 2
        of_file, of_batch = f"/v1/files/{file['id']}", f"/v1/batches/{batch['id']}"
        for path in (of_file, f"{of_file}/content", of_batch, "/v1/files/../keys"):
            assert (await ask("GET", path, "two"))[0] == 404, path
        for method, path in (("DELETE", of_file), ("POST", f"{of_batch}/cancel")):
            assert (await ask(method, path, "two"))[0] == 404, path
        assert (await ask("POST", "/v1/files", "two", form(b"x" * 2_000_000)))[0] == 413
        assert (await ask("GET", "/v1/batches", "two"))[1]["data"] == []
        assert (await ask("GET", "/v1/files", "three"))[0] == 403, "it has no name"
        assert len((await ask("GET", "/v1/files"))[1]["data"]) == 3
        assert (await ask("DELETE", of_file))[1]["deleted"]
        _, used = await ask("GET", "/usage")
        assert used["data"][0]["documents"] == 2
    with pytest.raises(SetupError, match="name another"):
        BatchStore(keys, ServerConfig())
