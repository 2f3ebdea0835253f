"""How long a server takes until its first line of output and until it is ready, its memory, and how long a
lone request takes; or how long `maxsimd rerank` takes. Beside another version of maxsimd, in turns."""

import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

_QUERY = "how is a file read"
_BODY = json.dumps({"query": _QUERY, "documents": ["Open a file."] * 20}).encode()
_LONE = json.dumps({"query": _QUERY, "documents": ["Open a file."], "cache": "bypass"}).encode()
_HEADERS = {"content-type": "application/json"}
_WARM_UP, _LONE_REQUESTS = 20, 200
_SECONDS = 120
# Lines of a file that `rerank` ranks.
_LINES = 100


class _Found(NamedTuple):
    """One server: seconds until its first line of output and until it is ready, its resident memory when
    it is ready and its peak after a request in MiB, and the median of lone requests in milliseconds."""

    first_line_s: float
    ready_s: float
    resident_mib: float
    peak_mib: float
    lone_request_ms: float


class _FoundOfRerank(NamedTuple):
    """One run of `maxsimd rerank`: seconds until its first line of output and until its end."""

    first_line_s: float
    total_s: float


class _FirstLine:
    """Reads what a process writes, so that it never waits, and notes when the first line came."""

    def __init__(self, out: IO[bytes]) -> None:
        self.at = 0.0
        self._out = out
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for _ in self._out:
            self.at = self.at or time.perf_counter()

    def join(self) -> None:
        self._thread.join()


def measure_startup(
    checkout: Path,
    other: Path | None,
    rounds: int,
    models: Sequence[str] = (),
    command: str = "serve",
    documents: Path | None = None,
    is_first: bool = False,
) -> dict[str, float]:
    """Medians for each of the models (folders; the default model without any). `other` is a checkout of
    another version, whose code is run by the same interpreter. `command` is serve or rerank; rerank ranks
    the first 100 lines of `documents`. `is_first`: no start finds what earlier ones have kept in the user's
    cache folder."""
    checkouts = {"this": checkout, **({} if other is None else {"other": other})}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="maxsimd-bench-") as folder:
        lines = _first_lines(documents or checkout / "LICENSE", Path(folder))
        for model in models or (None,):
            prefix = "" if len(models) < 2 or model is None else f"{Path(model).name}_"
            found: dict[str, list[_Found | _FoundOfRerank]] = {name: [] for name in checkouts}
            for round_ in range(rounds):
                # Each comes first as often as the other.
                for name in sorted(checkouts, reverse=round_ % 2 == 1):
                    with _caches(is_first) as caches:
                        measured = _Measured(checkouts[name], caches)
                        found[name].append(
                            _serve(measured, model) if command == "serve" else _rerank(measured, model, lines)
                        )
            figures |= {f"{prefix}{name}": value for name, value in _medians(found).items()}
    return figures


def _medians(found: "Mapping[str, Sequence[_Found | _FoundOfRerank]]") -> dict[str, float]:
    medians = {
        name: dict(zip(each[0]._fields, map(statistics.median, zip(*each, strict=True)), strict=True))
        for name, each in found.items()
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


class _Measured(NamedTuple):
    """A checkout, and what its process has in its environment besides."""

    folder: Path
    environment: Mapping[str, str]


@contextmanager
def _caches(are_new: bool) -> Iterator[Mapping[str, str]]:
    """Makes an empty cache folder, and gives the variable that names it; nothing if `are_new` is false."""
    if not are_new:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="maxsimd-bench-") as folder:
        yield {"XDG_CACHE_HOME": folder}


@contextmanager
def _process(
    measured: _Measured, arguments: Sequence[str]
) -> Iterator[tuple["subprocess.Popen[bytes]", _FirstLine]]:
    """A command of the version in a checkout; its standard error is read."""
    environment = os.environ | measured.environment
    environment |= {
        "PYTHONPATH": str(measured.folder / "tests" / "typings"),
        "MAXSIMD_DRAIN_SECONDS": "0",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "maxsimd", *arguments],
        env=environment,
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
            first.join()


def _serve(measured: _Measured, model: str | None) -> _Found:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    arguments = ["serve", *([] if model is None else [model]), "--port", str(port)]
    with _process(measured, arguments) as (server, first):
        while not _is_ready(url):
            if server.poll() is not None or time.perf_counter() - started > _SECONDS:
                raise RuntimeError(f"the server of {measured.folder} did not become ready")
            time.sleep(0.02)
        ready = time.perf_counter() - started
        resident = _memory_mib(server.pid, "VmRSS")
        request = urllib.request.Request(f"{url}/rerank", _BODY, _HEADERS)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        peak = _memory_mib(server.pid, "VmHWM")
        lone = _lone_request_ms(port)
    return _Found(first.at - started, ready, resident, peak, lone)


def _rerank(measured: _Measured, model: str | None, lines: Path) -> _FoundOfRerank:
    started = time.perf_counter()
    arguments = ["rerank", *([] if model is None else [model])]
    with _process(measured, [*arguments, "--query", _QUERY, "--documents", str(lines)]) as (process, first):
        status = process.wait(timeout=_SECONDS)
        seconds = time.perf_counter() - started
    if status != 0:
        raise RuntimeError(f"maxsimd rerank of {measured.folder} ended with {status}")
    return _FoundOfRerank(first.at - started, seconds)


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
