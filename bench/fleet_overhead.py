"""What several processes cost and gain beside one, with the embedded model: cached documents, whose scoring
takes little beside the way of a request, and new ones."""

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from maxsimd.bench.datasets import Request, numbered_documents
from maxsimd.bench.load import Send
from maxsimd.bench.peers.systems import maxsimd

_SERVERS = {
    "one process": (),
    "2 fronts, 1 replica": ("--fronts", "2"),
    "1 front, 2 replicas": ("--replicas", "2"),
    "2 fronts, 2 replicas": ("--fronts", "2", "--replicas", "2"),
}
_CACHED = (1, 10, 100, 1_000)
# Of new documents: a request, and requests at a time.
_NEW, _AT_A_TIME = 100, 4
_QUERY = "how is a file opened"


async def measure_overhead(executable: str | None, rounds: int, seconds: float) -> dict[str, Any]:
    """Medians of `rounds` rounds, in which the servers take turns: milliseconds of a request with cached
    documents, one at a time, and new documents a second, a few requests at a time for some seconds."""
    figures: dict[tuple[str, str], list[float]] = {}
    numbers = iter(range(1_000_000))
    documents = numbered_documents(max(_CACHED))
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            sends: dict[str, Send] = {}
            for name, options in _SERVERS.items():
                server = maxsimd(name, *options, "--cache-mb", "256", executable=executable)
                log = Path(folder, f"{len(sends)}.log")
                sends[name] = (await stack.enter_async_context(server.run(None, log))).send
            for send in sends.values():
                await send(Request(_QUERY, documents))
                await _new_documents_per_second(send, numbers, seconds)
            for _ in range(rounds):
                for name, send in sends.items():
                    for count in _CACHED:
                        took = await _seconds(send, Request(_QUERY, documents[:count]))
                        figures.setdefault((name, f"{count} cached ms"), []).append(took * 1e3)
                    speed = await _new_documents_per_second(send, numbers, seconds)
                    figures.setdefault((name, "new documents/s"), []).append(speed)
    return {f"{name}: {what}": round(statistics.median(all_), 2) for (name, what), all_ in figures.items()}


async def _seconds(send: Send, request: Request) -> float:
    """The median of some requests."""
    took = []
    for _ in range(20):
        started = time.perf_counter()
        await send(request)
        took.append(time.perf_counter() - started)
    return statistics.median(took)


async def _new_documents_per_second(send: Send, numbers: Any, seconds: float) -> float:
    texts = numbered_documents(_NEW)
    started = time.perf_counter()
    done = 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            mark = next(numbers)
            await send(Request(_QUERY, [f"{mark} {text}" for text in texts]))
            done += _NEW

    await asyncio.gather(*(client() for _ in range(_AT_A_TIME)))
    return done / (time.perf_counter() - started)
