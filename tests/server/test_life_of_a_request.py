"""docs/architecture.md names each file that a `/rerank` request passes, in order."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Run in a process of its own, because it profiles every thread from its start.
FOLLOW = """
import asyncio, pathlib, sys, threading
from aiohttp import ClientSession, web
import maxsimd.engine.engine
from maxsimd.api.app import STATE, build_app
from maxsimd.api.config import ServerConfig
from maxsimd.api.connection_table import ConnectionTable
from maxsimd.api.listener import Listener
from maxsimd.api.sockets import open_sockets
from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.execution import torch_linear
from maxsimd.engine.stats import EngineStats

root = pathlib.Path(sys.argv[1])
rooms = ("api", "engine", "pooling", "scheduler")
passed, following = {}, False
# Importing a module, and the task that measures the event loop, are no part of a request.
aside = ("<module>", "watch_lag")

def note(frame, event, _):
    if following and event == "call" and frame.f_code.co_name not in aside:
        try:
            path = pathlib.Path(frame.f_code.co_filename).resolve().relative_to(root)
        except ValueError:
            return
        if path.parts[0] in rooms and threading.current_thread().name != "maxsimd-cache-writer":
            passed.setdefault(str(path))

# Which way is fastest depends on the processor.
torch_linear.choose_way = lambda dtype: torch_linear.TORCH

async def main():
    global following
    # What looks at the device from time to time is no part of a request either.
    options = {"dtype": "float32", "threads": 1, "kernels": "torch", "maxsim": "tiled"}
    async with Engine(EngineConfig(**options, step_timeout_seconds=0)) as engine:
        config = ServerConfig()
        app = build_app(engine, config)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        table = ConnectionTable(config, 100, app[STATE].metrics)
        listener = Listener(runner.server, table, None)
        listener.start(open_sockets("127.0.0.1", 0))
        async with ClientSession(f"http://127.0.0.1:{listener.port}") as client:
            # So many that the request goes to the pool, as those do that are not alone.
            many = [f"city {i}" for i in range(40)]
            for documents in (["warm up"], ["Berlin", "Paris is a capital", "Paris is a capital", *many]):
                following = documents[0] == "Berlin"
                body = {"query": "capital", "documents": documents}
                async with client.post("/rerank", json=body) as response:
                    assert response.status == 200, await response.text()
                following = False
                while engine.stats() != EngineStats():  # the commit comes after the answer
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
        listener.close()
        await runner.cleanup()

threading.setprofile(note)
sys.setprofile(note)
asyncio.run(main())
print("\\n".join(passed))
"""


@pytest.mark.exhaustive  # eight seconds of the processor, and only the page can be wrong
def test_a_rerank_request_passes_the_files_that_the_map_names() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, section, _ = re.split("<!-- (?:end of )?a request's files -->", text)
    named = re.findall(r"^\d+\. `([\w/]+\.py)`", section, flags=re.MULTILINE)
    ran = subprocess.run(
        [sys.executable, "-c", FOLLOW, str(ROOT)], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    passed = ran.stdout.split()
    assert len(passed) > 20
    assert named == passed, "the files that a request passes, in order:\n" + "\n".join(passed)
