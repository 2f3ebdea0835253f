"""What is left of throughput while other processes keep the cores busy, beside sentence-transformers."""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from maxsimd.bench.datasets import Request, docstring_requests
from maxsimd.bench.load import Send
from maxsimd.bench.peers.checkpoints import save_cross_encoder
from maxsimd.bench.peers.systems import SentenceTransformers, System, maxsimd

NEIGHBOURS = (0, 1, 2, 4)
# Requests at a time: enough to keep a server busy.
_AT_A_TIME = 4
_DOCUMENTS = 20


async def measure_neighbours(executable: str | None, rounds: int, seconds: float) -> dict[str, Any]:
    """Documents a second of a cross-encoder with 0, 1, 2 and 4 busy processes in the same session, in turns.
    Fair is the share that as many processes with all cores to themselves would have: cores / (cores + n)."""
    systems: list[System] = [
        replace(maxsimd("maxsimd", executable=executable), own_session=False),
        SentenceTransformers("sentence-transformers", "bfloat16"),
    ]
    requests = docstring_requests(64, _DOCUMENTS, seed=0)
    speeds: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_cross_encoder(Path(folder, "cross-encoder"))
        async with AsyncExitStack() as stack:
            sends = {
                system.name: await stack.enter_async_context(
                    system.serve(checkpoint, Path(folder, f"{system.name}.log"))
                )
                for system in systems
            }
            for send in sends.values():
                await _documents_per_second(send, requests, seconds)
            for _ in range(rounds):
                for count in NEIGHBOURS:
                    async with _busy(count):
                        for name, send in sends.items():
                            speed = await _documents_per_second(send, requests, seconds)
                            speeds.setdefault((name, count), []).append(speed)
    return _figures([system.name for system in systems], speeds)


def _figures(names: list[str], speeds: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Medians, and each system's share of its own speed on the quiet machine."""
    cores = len(os.sched_getaffinity(0))
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    figures: dict[str, Any] = {"cores": cores}
    for count in NEIGHBOURS:
        fair = min(1.0, cores / (cores + count))
        figures[f"fair_share_with_{count}"] = round(fair, 3)
        for name in names:
            figures[f"{name}_documents_per_s_with_{count}"] = round(medians[name, count], 1)
            figures[f"{name}_share_with_{count}"] = round(medians[name, count] / medians[name, 0], 3)
    return figures


async def _documents_per_second(send: Send, requests: list[Request], seconds: float) -> float:
    """For about that long, a few requests at a time."""
    started = time.perf_counter()
    done = 0

    async def client(number: int) -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            await send(requests[number % len(requests)])
            done += _DOCUMENTS
            number += _AT_A_TIME

    await asyncio.gather(*(client(number) for number in range(_AT_A_TIME)))
    return done / (time.perf_counter() - started)


@asynccontextmanager
async def _busy(count: int) -> AsyncIterator[None]:
    """Processes that do nothing but compute."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])  # noqa: ASYNC220 (starting takes no time)
        for _ in range(count)
    ]
    try:
        await asyncio.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
