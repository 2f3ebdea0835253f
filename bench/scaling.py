"""A server of our own under many clients, and with few and many documents a request."""

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from maxsimd.bench.datasets import QUERY, Request, docstring_pairs
from maxsimd.bench.load import drive
from maxsimd.bench.peers.systems import Running, maxsimd

SIZES = (10, 100, 1000, 10_000)
LAG = "maxsimd_event_loop_lag_seconds"
MEMORY = "process_resident_memory_bytes"
# Requests of at most SMALL documents are sent a few at a time, so that the device does not wait for the next.
SMALL, AT_A_TIME = 1000, 4


async def measure_scaling(model: str | None, clients: int, rounds: int) -> dict[str, Any]:
    """The event loop's lag under `clients`, the time a document takes by request size, and memory."""
    texts = [pair.document for pair in docstring_pairs()]
    with tempfile.TemporaryDirectory() as folder:
        # All clients' requests are to be served, however long the last of them waits.
        async with maxsimd("maxsimd", "--max-wait-seconds", "3600").run(
            model, Path(folder, "log")
        ) as running:
            figures = await _under_clients(running, texts, clients)
            return figures | await _by_size(running, texts, rounds)


async def _under_clients(running: Running, texts: list[str], clients: int) -> dict[str, Any]:
    requests = [Request(QUERY, _distinct(texts, 100, f"client {i}")) for i in range(clients)]
    await drive(running.send, [Request(QUERY, texts[:200])], 1, None, 0)
    before = await _buckets(running.session)
    duration, outcomes = await drive(running.send, requests, clients, None, 0)
    after = await _buckets(running.session)
    _check(outcomes)
    counts = {bound: after[bound] - before[bound] for bound in after}
    return {
        "clients": clients,
        "clients_done_after_s": round(duration, 2),
        "lag_samples": int(counts[float("inf")]),
        "share_of_lag_up_to_5_ms": round(counts[0.005] / counts[float("inf")], 4),
        "lag_p99_ms": round(_quantile(counts, 0.99) * 1e3, 2),
        "memory_then_mb": await _megabytes(running.session),
    }


async def _by_size(running: Running, texts: list[str], rounds: int) -> dict[str, Any]:
    """The same documents in requests of every size; the largest has them several times, numbered."""
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    base = [f"{i // len(texts)} {texts[i % len(texts)]}" for i in range(SMALL)]
    memory = []
    for number in range(rounds):
        for size in SIZES:
            documents = [
                f"{number} {copy} {text}" for copy in range(max(1, size // len(base))) for text in base
            ]
            parts = [documents[start : start + size] for start in range(0, len(documents), size)]
            requests = [Request(QUERY, part) for part in parts]
            duration, outcomes = await drive(
                running.send, requests, AT_A_TIME if size <= SMALL else 1, None, 0
            )
            _check(outcomes)
            seconds[size].append(duration / len(documents))
        memory.append(await _megabytes(running.session))
    medians = {size: statistics.median(taken) * 1e3 for size, taken in seconds.items()}
    return {
        "ms_a_document": {str(size): round(taken, 3) for size, taken in medians.items()},
        "slowest_size_over_fastest": round(max(medians.values()) / min(medians.values()), 3),
        "memory_by_round_mb": " ".join(map(str, memory)),
    }


def _distinct(texts: list[str], count: int, mark: str) -> list[str]:
    return [f"{mark} {text}" for text in texts[:count]]


def _check(outcomes: list[Any]) -> None:
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")


async def samples(session: aiohttp.ClientSession) -> list[Any]:
    """All that the server counts and measures now."""
    async with session.get("/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    return [sample for family in families for sample in family.samples]


async def _buckets(session: aiohttp.ClientSession) -> dict[float, float]:
    """The histogram of the event loop's lag: how many samples are at most each number of seconds."""
    return {
        float(sample.labels["le"]): sample.value
        for sample in await samples(session)
        if sample.name == f"{LAG}_bucket"
    }


async def _megabytes(session: aiohttp.ClientSession) -> int:
    return next(int(sample.value / 1e6) for sample in await samples(session) if sample.name == MEMORY)


def _quantile(counts: dict[float, float], share: float) -> float:
    """A quantile of a histogram, linear within its bucket."""
    wanted = share * counts[float("inf")]
    bounds = [0.0, *sorted(counts)]
    for lower, upper in pairwise(bounds):
        below = counts.get(lower, 0.0)
        if counts[upper] >= wanted:
            return (
                lower
                if upper == float("inf")
                else lower + (upper - lower) * (wanted - below) / max(1e-9, counts[upper] - below)
            )
    return bounds[-1]
