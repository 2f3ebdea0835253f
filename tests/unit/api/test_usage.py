"""Usage by tenant, model and day."""

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from maxsimd.api import usage
from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.handlers import handle
from maxsimd.api.state import ServerState
from maxsimd.api.usage import KEPT_DAYS, UsageLog, Used
from maxsimd.engine import Engine
from tests.unit.calling_handlers import Pieces

ONE = Used(1, 2, 30, 4, 0.5, 0)


async def test_tenants_see_what_they_used(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("boss name=boss admin=yes\none name=one requests_per_minute=3\ntwo\nthree\n")

    async def ask(path: str, key: str, **body: object) -> Any:
        pieces, headers = Pieces([json.dumps(body).encode()]), {"authorization": f"Bearer {key}"}
        answer = await handle(state, "POST" if body else "GET", path, headers, pieces)
        return answer.body.decode() if path.endswith("csv") else (answer.status, json.loads(answer.body))

    async with Engine() as engine:
        state = ServerState(engine, ServerConfig(api_key_file=str(keys), usage_file=str(tmp_path / "usage")))
        _, first = await ask("/rerank", "one", query="q", documents=["a", "b"])
        _, again = await ask("/score", "one", queries="q", documents=["a", "b"])
        _, embedded = await ask("/v1/embeddings", "one", input="a")
        assert (await ask("/rerank", "one", query="q", documents=["a"]))[0] == 429
        assert (await ask("/rerank", "two", query="q", documents=[1]))[0] == 400
        await ask("/rerank", "two", query="q", documents=["c"])
        _, shown = await ask("/usage", "one")
        [row] = shown["data"]
        counts = [row[name] for name in ("tenant", "model", "requests", "documents", "refused")]
        assert counts == ["one", "all-MiniLM-L6-v2", 3, 5, 1]
        tokens = [each["usage"]["prompt_tokens"] for each in (first, again, embedded)]
        assert row["tokens"] == sum(tokens)
        assert row["cached_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert (await ask("/usage", "two"))[0] == 403, "its number changes"
        _, everything = await ask("/usage", "boss")
        assert [each["tenant"] for each in everything["data"]] == ["one", "unnamed"]
        lines = (await ask("/usage.csv", "boss")).splitlines()
        assert [line.split(",")[1] for line in lines] == ["tenant", "one", "unnamed"]
        assert lines[1] == ",".join(str(value) for value in row.values())
        in_steps = engine.metrics.registry.get_sample_value("maxsimd_step_seconds_sum")
        shared = sum(each["device_seconds"] for each in everything["data"])
        assert 0 < shared <= in_steps * 1.001
        name = "maxsimd_usage_documents_total"
        labels = {"tenant": "one", "model": "all-MiniLM-L6-v2"}
        assert engine.metrics.registry.get_sample_value(name, labels) == 5


def test_a_file_adds_up_what_processes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage"
    first, second = UsageLog(path), UsageLog(path)
    assert path.stat().st_mode & 0o777 == 0o600
    for log in (first, second, first):
        log.count("a", "m", ONE)
    second.count("b", "m", ONE)
    first.flush()
    assert [(key[1:], used) for key, used in second.rows(None)] == [
        (("a", "m"), Used(3, 6, 90, 12, 1.5, 0)), (("b", "m"), ONE),
    ]  # fmt: skip
    assert [key[1] for key, _ in UsageLog(path).rows("b")] == ["b"]
    with closing(sqlite3.connect(path)) as locked:
        monkeypatch.setattr(usage, "_LOCK_SECONDS", 0.01)
        locked.execute("BEGIN EXCLUSIVE")
        first.count("a", "m", ONE)
        first.flush()
        assert first.rows("a")[0][1].requests == 1, "the file cannot be read either"
    assert first.rows("a")[0][1].requests == 4, "nothing is lost"
    later = time.time() + 86_400 * (KEPT_DAYS + 1)
    monkeypatch.setattr(time, "time", lambda: later)
    first.count("c", "m", ONE)
    assert [key[1] for key, _ in first.rows(None)] == ["c"]


def test_a_file_of_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    path.write_text("not a database, and long enough to be read as one" * 9)
    for wrong in (path, tmp_path, tmp_path / "missing" / "usage"):
        with pytest.raises(SetupError, match="name another one"):
            UsageLog(wrong)
