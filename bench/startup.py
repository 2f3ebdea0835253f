"""`maxsimd bench startup`: start, memory and lone requests of a server, or the time of `maxsimd rerank`, in
turns with another version."""

import asyncio
import http.client
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from maxsimd.bench.datasets import QUERY, Request
from maxsimd.bench.load import Server, run_rerank
from maxsimd.bench.report import Figures
from maxsimd.bench.turns import medians, take_turns

_LONE = json.dumps({"query": QUERY, "documents": ["Open a file."], "cache": "bypass"}).encode()
_WARM_UP, _LONE_REQUESTS = 20, 200
# Lines of a file that `rerank` ranks.
_LINES = 100


async def measure_startup(
    other: Path | None,
    rounds: int,
    models: Sequence[str],
    command: str,
    documents: Path | None,
    first: bool,
) -> Figures:
    """Medians for each of the models (folders; the default model without any), of the checkout in the working
    directory and, in turns, of another version's (`other`), by the same interpreter. `command` is serve or
    rerank; rerank ranks the first 100 lines of `documents`. With `first`, each has an empty cache folder."""
    checkouts = {"this": Path.cwd(), **({} if other is None else {"other": other})}
    text = (documents or Path("LICENSE")).read_text(encoding="utf-8")
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="maxsimd-bench-") as folder:
        lines = Path(folder) / "lines.txt"
        filled = [line for line in text.splitlines() if line.strip()]
        lines.write_text("\n".join(filled[:_LINES]) + "\n", encoding="utf-8")

        async def start(checkout: Path, model: str | None) -> dict[str, float]:
            environment = {"PYTHONPATH": str(checkout / "tests" / "typings")}
            with tempfile.TemporaryDirectory(prefix="maxsimd-bench-") as caches:
                if first:
                    environment["XDG_CACHE_HOME"] = caches
                if command == "serve":
                    return await _serve(environment, model, Path(folder, "log"))
                printed = await run_rerank(str(lines), *([model] if model else []), **environment)
                return {"first_line_s": printed[0][0], "total_s": printed[-1][0]}

        for model in models or (None,):
            prefix = "" if len(models) < 2 or model is None else f"{Path(model).name}_"
            starts = {name: partial(start, checkout, model) for name, checkout in checkouts.items()}
            turns = await take_turns(starts, rounds, warm_up=False)
            found = {name: medians(results, 3) for name, results in turns.results.items()}
            figures |= {
                f"{prefix}{name}_{what}": x for name, each in found.items() for what, x in each.items()
            }
            for what, value in found["this"].items() if other is not None else ():
                figures[f"{prefix}{what}_this_over_other"] = round(value / found["other"][what], 3)
    return figures


async def _serve(environment: dict[str, str], model: str | None, log: Path) -> dict[str, float]:
    """One server: memory in MiB when it is ready, and its peak after a request; the median lone request."""
    server = Server("maxsimd", (sys.executable, "-m", "maxsimd", "serve"), environment)
    async with server.run(model, log) as running:
        resident = _memory_mib(running.pid, "VmRSS")
        await running.send(Request(QUERY, ["Open a file."] * 20))
        return {
            "first_line_s": running.first_line_s,
            "ready_s": running.ready_s,
            "resident_mib": resident,
            "peak_mib": _memory_mib(running.pid, "VmHWM"),
            "lone_request_ms": await asyncio.to_thread(_lone_request_ms, running.port),
        }


def _memory_mib(pid: int, what: str) -> float:
    """A figure of /proc/PID/status."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(rf"{what}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def _lone_request_ms(port: int) -> float:
    """The median. The client does as little as possible: it shares the server's cores."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seconds = []
    for _ in range(_WARM_UP + _LONE_REQUESTS):
        started = time.perf_counter()
        connection.request("POST", "/rerank", _LONE, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        seconds.append(time.perf_counter() - started)
        if answer.status != 200:
            raise RuntimeError(f"a request was answered {answer.status}")
    connection.close()
    return 1000 * statistics.median(seconds[_WARM_UP:])
