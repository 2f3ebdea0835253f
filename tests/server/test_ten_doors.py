"""The ten doors of docs/architecture.md."""

import asyncio
import re
import sys
import threading
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from maxsimd.api.config import ServerConfig
from maxsimd.api.http.app import build_app
from maxsimd.engine import Engine, EngineConfig

ROOT = Path(__file__).parents[2]
_PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Columns: number, door, file, types.
_DOORS = re.findall(r"^\| \d+ \| \w[\w ]* \| `([\w/]+\.py)`.*? \| (.*) \|$", _PAGE, flags=re.MULTILINE)


@cache
def _file(name: str) -> str:
    path = Path(name).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""


def test_a_request_passes_the_ten_doors_in_order() -> None:
    passed: list[str] = []
    following = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        if following and event == "call":
            passed.append(_file(frame.f_code.co_filename))

    async def rerank() -> int:
        nonlocal following
        engine = Engine(EngineConfig(threads=1))
        async with engine, TestClient(TestServer(build_app(engine, ServerConfig()))) as client:
            following = True
            body = {"query": "capital", "documents": ["Berlin", "Paris is a capital"]}
            async with client.post("/rerank", json=body) as response:
                await response.read()
            following = False
            return response.status

    # The device thread is profiled from its start.
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert asyncio.run(rerank()) == 200
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    doors = [file for file, _ in _DOORS]
    assert len(doors) == 10
    rest = iter(passed)
    assert [door for door in doors if door not in rest] == [], "not passed, or not in this order"


def test_the_types_between_the_doors_exist() -> None:
    types = {name for _, handed in _DOORS for name in re.findall(r"`(\w+)`", handed)}
    assert len(types) >= 7
    rooms = [ROOT / name for name in ("api", "engine", "pooling", "scheduler")]
    source = "\n".join(path.read_text(encoding="utf-8") for room in rooms for path in room.rglob("*.py"))
    assert [name for name in types if not re.search(rf"^class {name}\b", source, flags=re.MULTILINE)] == []
