"""`maxsimd bench startup`: start, memory and lone requests of a server, or the time of `maxsimd rerank`, in
turns with another version."""

import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from maxsimd.bench.load import free_port

_QUERY = "how is a file read"
_BODY = json.dumps({"query": _QUERY, "documents": ["Open a file."] * 20}).encode()
_LONE = json.dumps({"query": _QUERY, "documents": ["Open a file."], "cache": "bypass"}).encode()
_HEADERS = {"content-type": "application/json"}
_WARM_UP, _LONE_REQUESTS = 20, 200
_SECONDS = 120
# Lines of a file that `rerank` ranks.
_LINES = 100


def measure_startup(
    other: Path | None,
    rounds: int,
    models: Sequence[str],
    command: str,
    documents: Path | None,
    first: bool,
) -> dict[str, float]:
    """Medians for each of the models (folders; the default model without any), of the checkout in the working
    directory and, in turns, of another version's (`other`), by the same interpreter. `command` is serve or
    rerank; rerank ranks the first 100 lines of `documents`. With `first`, each has an empty cache folder."""
    checkouts = {"this": Path.cwd(), **({} if other is None else {"other": other})}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="maxsimd-bench-") as folder:
        lines = _first_lines(documents or Path("LICENSE"), Path(folder))
        for model in models or (None,):
            prefix = "" if len(models) < 2 or model is None else f"{Path(model).name}_"
            found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
            for number in range(rounds):
                # Each comes first as often as the other.
                for name in sorted(checkouts, reverse=number % 2 == 1):
                    with ExitStack() as stack:
                        environment = {"PYTHONPATH": str(checkouts[name] / "tests" / "typings")}
                        if first:
                            cache = tempfile.TemporaryDirectory(prefix="maxsimd-bench-")
                            environment["XDG_CACHE_HOME"] = stack.enter_context(cache)
                        measure = _serve if command == "serve" else _rerank
                        found[name].append(measure(environment, [] if model is None else [model], lines))
            figures |= {f"{prefix}{name}": value for name, value in _medians(found).items()}
    return figures


def _medians(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    medians = {
        name: {what: statistics.median(each[what] for each in some) for what in some[0]}
        for name, some in found.items()
    }
    figures = {
        f"{name}_{what}": round(value, 3) for name, each in medians.items() for what, value in each.items()
    }
    if "other" in medians:
        for what, value in medians["this"].items():
            figures[f"{what}_this_over_other"] = round(value / medians["other"][what], 3)
    return figures


def _first_lines(path: Path, folder: Path) -> Path:
    """A file with the first lines that hold text."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    target = folder / "lines.txt"
    target.write_text("\n".join(lines[:_LINES]) + "\n", encoding="utf-8")
    return target


class _FirstLine:
    """Reads all output of a process, which never waits for that, and the time of the first line."""

    def __init__(self, out: IO[bytes]) -> None:
        self.at = 0.0
        self._out = out
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for _ in self._out:
            self.at = self.at or time.perf_counter()


@contextmanager
def _process(
    environment: Mapping[str, str], arguments: Sequence[str]
) -> Iterator[tuple["subprocess.Popen[bytes]", _FirstLine]]:
    """A command of maxsimd whose standard error is read."""
    with subprocess.Popen(
        [sys.executable, "-m", "maxsimd", *arguments],
        env=os.environ | environment | {"MAXSIMD_DRAIN_SECONDS": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        first = _FirstLine(process.stderr)
        try:
            yield process, first
        finally:
            process.terminate()
            process.wait()
            first.thread.join()


def _serve(environment: Mapping[str, str], model: list[str], lines: Path) -> dict[str, float]:
    """One server: memory in MiB when it is ready, and its peak after a request; the median lone request."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    with _process(environment, ["serve", *model, "--port", str(port)]) as (server, first):
        while not _is_ready(url):
            if server.poll() is not None or time.perf_counter() - started > _SECONDS:
                raise RuntimeError(f"the server did not become ready with {environment}")
            time.sleep(0.02)
        ready = time.perf_counter() - started
        resident = _memory_mib(server.pid, "VmRSS")
        request = urllib.request.Request(f"{url}/rerank", _BODY, _HEADERS)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        peak = _memory_mib(server.pid, "VmHWM")
        lone = _lone_request_ms(port)
    found = {"first_line_s": first.at - started, "ready_s": ready}
    return found | {"resident_mib": resident, "peak_mib": peak, "lone_request_ms": lone}


def _rerank(environment: Mapping[str, str], model: list[str], lines: Path) -> dict[str, float]:
    started = time.perf_counter()
    arguments = ["rerank", *model, "--query", _QUERY, "--documents", str(lines)]
    with _process(environment, arguments) as (process, first):
        status = process.wait(timeout=_SECONDS)
        seconds = time.perf_counter() - started
    if status != 0:
        raise RuntimeError(f"maxsimd rerank ended with {status} with {environment}")
    return {"first_line_s": first.at - started, "total_s": seconds}


def _memory_mib(pid: int, what: str) -> float:
    """A figure of /proc/PID/status."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(rf"{what}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def _lone_request_ms(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seconds = []
    for _ in range(_WARM_UP + _LONE_REQUESTS):
        started = time.perf_counter()
        connection.request("POST", "/rerank", _LONE, _HEADERS)
        answer = connection.getresponse()
        answer.read()
        seconds.append(time.perf_counter() - started)
        if answer.status != 200:
            raise RuntimeError(f"a request was answered {answer.status}")
    connection.close()
    return 1000 * statistics.median(seconds[_WARM_UP:])


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
