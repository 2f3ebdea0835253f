"""One-document requests beside batches of 10,000 documents: what each costs the other."""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from maxsimd.bench.datasets import docstring_pairs, numbered_documents
from maxsimd.bench.load import p99
from maxsimd.bench.peers.systems import Running, maxsimd
from maxsimd.bench.scaling import samples

BATCH_DOCUMENTS = 10_000
_BATCHES_AT_A_TIME = 2
_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """One-document requests come at `rate` a second (Poisson); batches of the given priority come without a
    pause. Each combination lasts `seconds`, in `rounds` turns."""

    rate: float
    priority: str | None
    rounds: int
    seconds: float
    seed: int = 0


async def measure_mixed_load(model: str | None, load: MixedLoad, *options: str) -> dict[str, Any]:
    """Interactive requests alone, batches alone, and both, in turns; medians. Throughput of batches is in
    tokens that the model ran for them alone."""
    pairs = docstring_pairs()
    batch = _body(pairs[0].query, numbered_documents(BATCH_DOCUMENTS), load.priority)
    client = _Interactive([_body(pair.query, [pair.document], None) for pair in pairs[:500]], load)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with maxsimd("maxsimd", *options).run(model, Path(folder, "log")) as running:
            await client.run(running.session)
            for _ in range(load.rounds):
                figures = await _round(running, client, batch, load.seconds)
                for name, value in figures.items():
                    found.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "interactive_per_s": load.rate,
        **{name: round(value, 2) for name, value in medians.items()},
        "p99_beside_batches_over_alone": round(medians["p99_beside_batches_ms"] / medians["p99_alone_ms"], 2),
        "batch_beside_interactive_over_alone": round(
            medians["batch_tokens_per_s_beside"] / medians["batch_tokens_per_s_alone"], 3
        ),
    }


async def _round(running: Running, client: "_Interactive", batch: bytes, seconds: float) -> dict[str, float]:
    alone, _ = await client.run(running.session)
    async with _batches(running.session, batch):
        before = await _tokens(running.session), time.perf_counter()
        await asyncio.sleep(seconds)
        between = await _tokens(running.session), time.perf_counter()
        beside, interactive_tokens = await client.run(running.session)
        after = await _tokens(running.session), time.perf_counter()
    return {
        "p50_alone_ms": statistics.median(alone) * 1e3,
        "p99_alone_ms": p99(alone) * 1e3,
        "p50_beside_batches_ms": statistics.median(beside) * 1e3,
        "p99_beside_batches_ms": p99(beside) * 1e3,
        "batch_tokens_per_s_alone": (between[0] - before[0]) / (between[1] - before[1]),
        "batch_tokens_per_s_beside": (after[0] - between[0] - interactive_tokens) / (after[1] - between[1]),
    }


class _Interactive:
    """Sends one-document requests, each at its time, whatever becomes of those before."""

    def __init__(self, bodies: list[bytes], load: MixedLoad) -> None:
        self._bodies = bodies
        self._load = load
        self._draw = random.Random(load.seed)
        self._number = 0

    async def run(self, session: aiohttp.ClientSession) -> tuple[list[float], int]:
        """The seconds of each request, and the tokens of all."""
        started = time.perf_counter()
        tasks, due = [], self._draw.expovariate(self._load.rate)
        while due < self._load.seconds:
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            self._number += 1
            body = self._bodies[self._number % len(self._bodies)]
            tasks.append(asyncio.create_task(_send(session, body)))
            due += self._draw.expovariate(self._load.rate)
        await asyncio.sleep(max(0.0, started + self._load.seconds - time.perf_counter()))
        answers = await asyncio.gather(*tasks)
        return [seconds for seconds, _ in answers], sum(tokens for _, tokens in answers)


@asynccontextmanager
async def _batches(session: aiohttp.ClientSession, batch: bytes) -> AsyncIterator[None]:
    """Sends batches until the context ends, and the next before the last is done, so that steps stay full
    while one is prepared; the last are given up then."""

    async def send() -> None:
        while True:
            await _send(session, batch)

    sending = [asyncio.create_task(send()) for _ in range(_BATCHES_AT_A_TIME)]
    try:
        # Until all of the first batches are prepared and steps are full.
        await asyncio.sleep(5)
        _check(sending)
        yield
        _check(sending)
    finally:
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        await asyncio.sleep(1)


def _check(sending: list[asyncio.Task[None]]) -> None:
    """Raises what went wrong with batches: they end in no other way."""
    for each in sending:
        if each.done():
            each.result()


async def _send(session: aiohttp.ClientSession, body: bytes) -> tuple[float, int]:
    """The seconds until the answer, and its tokens."""
    started = time.perf_counter()
    async with session.post("/rerank", data=body, headers=_HEADERS) as response:
        answer = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer[:500]!r}")
    seconds = time.perf_counter() - started
    return seconds, msgspec.json.decode(answer)["usage"]["total_tokens"]


async def _tokens(session: aiohttp.ClientSession) -> float:
    """How many tokens the model has run."""
    return float(next(s.value for s in await samples(session) if s.name == "maxsimd_tokens_total"))


def _body(query: str, documents: list[str], priority: str | None) -> bytes:
    given = {"query": query, "documents": documents, "return_documents": False, "cache": "bypass"}
    return msgspec.json.encode(given if priority is None else given | {"priority": priority})
