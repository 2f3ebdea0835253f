"""How long a server of the default model takes until it is ready, and the most memory that it then has had;
beside another version of maxsimd, in turns."""

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

_BODY = json.dumps({"query": "how is a file read", "documents": ["Open a file."] * 20}).encode()
_SECONDS = 120


def measure_startup(checkout: Path, other: Path | None, rounds: int) -> dict[str, float]:
    """Medians; `other` is a checkout of another version, whose code is run by the same interpreter."""
    checkouts = {"this": checkout, **({} if other is None else {"other": other})}
    seconds: dict[str, list[float]] = {name: [] for name in checkouts}
    memory: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(rounds):
        for name, folder in checkouts.items():
            taken, peak = _one(folder)
            seconds[name].append(taken)
            memory[name].append(peak)
    figures = {}
    for name in checkouts:
        figures[f"{name}_ready_s"] = round(statistics.median(seconds[name]), 3)
        figures[f"{name}_peak_mib"] = round(statistics.median(memory[name]), 1)
    if other is not None:
        for what, found in (("ready", seconds), ("peak", memory)):
            ratio = statistics.median(found["this"]) / statistics.median(found["other"])
            figures[f"{what}_this_over_other"] = round(ratio, 3)
    return figures


def _one(folder: Path) -> tuple[float, float]:
    """Seconds until a server is ready, and its peak of resident memory after a request, in MiB."""
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
            request = urllib.request.Request(f"{url}/rerank", _BODY, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
            status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
        finally:
            server.terminate()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return seconds, int(found[1]) / 1024


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
