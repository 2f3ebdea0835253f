"""How long a server of the default model takes until it is ready, the most memory that it then has had, and
how long a lone request takes; beside another version of maxsimd, in turns."""

import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

_BODY = json.dumps({"query": "how is a file read", "documents": ["Open a file."] * 20}).encode()
_LONE = json.dumps({"query": "how is a file read", "documents": ["Open a file."], "cache": "bypass"}).encode()
_HEADERS = {"content-type": "application/json"}
_WARM_UP, _LONE_REQUESTS = 20, 200
_SECONDS = 120


def measure_startup(checkout: Path, other: Path | None, rounds: int) -> dict[str, float]:
    """Medians; `other` is a checkout of another version, whose code is run by the same interpreter."""
    checkouts = {"this": checkout, **({} if other is None else {"other": other})}
    found: dict[str, list[_Found]] = {name: [] for name in checkouts}
    for round_ in range(rounds):
        # Each comes first as often as the other.
        for name in sorted(checkouts, reverse=round_ % 2 == 1):
            found[name].append(_one(checkouts[name]))
    medians = {
        name: _Found(*(statistics.median(values) for values in zip(*each, strict=True)))
        for name, each in found.items()
    }
    figures = {
        f"{name}_{what}": round(value, 3)
        for name, each in medians.items()
        for what, value in each._asdict().items()
    }
    if other is not None:
        for what in _Found._fields:
            ratio = getattr(medians["this"], what) / getattr(medians["other"], what)
            figures[f"{what}_this_over_other"] = round(ratio, 3)
    return figures


class _Found(NamedTuple):
    """Of one server: seconds until it is ready, its peak of resident memory after a request in MiB, and the
    median of lone requests in milliseconds."""

    ready_s: float
    peak_mib: float
    lone_request_ms: float


def _one(folder: Path) -> _Found:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "PYTHONPATH": str(folder / "tests" / "typings")}
    started = time.perf_counter()
    command = [sys.executable, "-m", "maxsimd", "serve", "--port", str(port)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            while not _is_ready(url):
                if server.poll() is not None or time.perf_counter() - started > _SECONDS:
                    raise RuntimeError(f"the server of {folder} did not become ready")
                time.sleep(0.02)
            seconds = time.perf_counter() - started
            request = urllib.request.Request(f"{url}/rerank", _BODY, _HEADERS)
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
            status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
            lone = _lone_request_ms(port)
        finally:
            server.terminate()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return _Found(seconds, int(found[1]) / 1024, lone)


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
