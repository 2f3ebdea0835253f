"""What servers of several processes cost and gain beside one process, with the embedded model: cached
documents, whose scoring takes little beside the way of a request, and new ones."""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from maxsimd.bench.datasets import QUERY, Request, numbered_documents
from maxsimd.bench.load import Send
from maxsimd.bench.peers.systems import Server

_CACHED = (1, 10, 100, 1_000)
# Of new documents: a request, and requests at a time.
_NEW, _AT_A_TIME = 100, 4
_REQUESTS = 20


async def measure_overhead(
    servers: Sequence[Server], rounds: int, seconds: float, titles: Mapping[str, str]
) -> dict[str, Any]:
    """Medians of `rounds` rounds, in which the servers take turns: milliseconds of a request with cached
    documents, one at a time, and new documents a second, a few requests at a time for some seconds; of
    processes whose titles begin as the `titles` say, by a name, processor time in milliseconds a request with
    cached documents."""
    figures: dict[tuple[str, str], list[float]] = {}
    numbers = iter(range(1_000_000))
    documents = numbered_documents(max(_CACHED))
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            sends: dict[str, Send] = {}
            for server in servers:
                log = Path(folder, f"{len(sends)}.log")
                sends[server.name] = (await stack.enter_async_context(server.run(None, log))).send
            for send in sends.values():
                await send(Request(QUERY, documents))
                await _new_documents_per_second(send, numbers, seconds)
            for _ in range(rounds):
                for name, send in sends.items():
                    for count in _CACHED:
                        before = _processor_seconds(titles)
                        took = await _seconds(send, Request(QUERY, documents[:count]))
                        figures.setdefault((name, f"{count} cached ms"), []).append(took * 1e3)
                        for kind, used in _used_since(before, titles):
                            what = f"{count} cached, processor ms of {kind}"
                            figures.setdefault((name, what), []).append(used * 1e3 / _REQUESTS)
                    speed = await _new_documents_per_second(send, numbers, seconds)
                    figures.setdefault((name, "new documents/s"), []).append(speed)
    return {f"{name}: {what}": round(statistics.median(all_), 2) for (name, what), all_ in figures.items()}


async def _seconds(send: Send, request: Request) -> float:
    """The median of some requests."""
    took = []
    for _ in range(_REQUESTS):
        started = time.perf_counter()
        await send(request)
        took.append(time.perf_counter() - started)
    return statistics.median(took)


async def _new_documents_per_second(send: Send, numbers: Iterator[int], seconds: float) -> float:
    texts = numbered_documents(_NEW)
    started = time.perf_counter()
    done = 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            mark = next(numbers)
            await send(Request(QUERY, [f"{mark} {text}" for text in texts]))
            done += _NEW

    await asyncio.gather(*(client() for _ in range(_AT_A_TIME)))
    return done / (time.perf_counter() - started)


def _processor_seconds(titles: Mapping[str, str]) -> dict[str, float]:
    """By the titles' names, what all processes together have used that are titled so."""
    used = dict.fromkeys(titles, 0.0)
    for entry in filter(str.isdigit, os.listdir("/proc") if titles else ()):
        with suppress(OSError):
            title = Path("/proc", entry, "cmdline").read_text()
            for kind in (kind for kind, start in titles.items() if title.startswith(start)):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                used[kind] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def _used_since(before: Mapping[str, float], titles: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Those that have used something since then, and how many seconds."""
    for kind, seconds in _processor_seconds(titles).items():
        if seconds > before[kind]:
            yield kind, seconds - before[kind]
