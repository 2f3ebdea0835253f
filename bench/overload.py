"""A server of its own beyond what it can do: what it serves, how fast, and how fast it refuses the rest."""

import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from maxsimd.bench.datasets import Request, docstring_requests
from maxsimd.bench.load import p99
from maxsimd.bench.peers.systems import Running, maxsimd

_DOCUMENTS = 20
CONCURRENCY = (2, 4, 8, 16, 32)
TIMES = (2, 5, 10)
_PAUSE_SECONDS = 0.25
# The share of a measurement after which answers count.
_RAMP = 0.2


class _Usage(msgspec.Struct):
    total_tokens: int


class _Served(msgspec.Struct):
    """What is read of an answer."""

    usage: _Usage


@dataclass(frozen=True, slots=True)
class _Answer:
    """`came` is when (perf_counter); `tokens` are those that were run for it."""

    status: int
    seconds: float
    came: float
    tokens: int


async def measure_overload(
    model: str | None, wait_seconds: float, seconds: float, seed: int = 0
) -> dict[str, Any]:
    """Capacity is the best throughput of clients that wait for each answer; then requests come at random
    moments (Poisson), at several times that rate, for `seconds` each. Throughput is in tokens: whether a
    request is refused depends on its size, so that answers a second would say more of sizes than of the
    server."""
    requests = docstring_requests(200, _DOCUMENTS, seed)
    bodies = [_body(request) for request in requests]
    server = maxsimd("maxsimd", "--max-wait-seconds", str(wait_seconds))
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        async with server.run(model, Path(folder, "log")) as running:
            await _closed(running, bodies, 8, seconds / 4)
            capacity, best = await _capacity(running, bodies, seconds / 2)
            figures: dict[str, Any] = {"documents": _DOCUMENTS, "max_wait_seconds": wait_seconds, **capacity}
            for times in TIMES:
                answers, duration = await _open(running.session, bodies, times * best, seconds, draw)
                figures |= {
                    f"{name}_at_{times}_times": value for name, value in _shown(answers, duration).items()
                }
    return figures


async def _capacity(running: Running, bodies: list[bytes], seconds: float) -> tuple[dict[str, Any], float]:
    """Of several numbers of clients the one with the best throughput, and that throughput."""
    best: tuple[float, int, list[_Answer], float] | None = None
    for clients in CONCURRENCY:
        answers, duration = await _closed(running, bodies, clients, seconds)
        tokens = sum(answer.tokens for answer in answers)
        if best is None or tokens > best[0]:
            best = tokens, clients, answers, duration
    assert best is not None
    _, clients, answers, duration = best
    rate = sum(answer.status == 200 for answer in answers) / duration
    return {"clients_at_capacity": clients, **_shown(answers, duration)}, rate


def _shown(answers: list[_Answer], duration: float) -> dict[str, Any]:
    served = sorted(answer.seconds for answer in answers if answer.status == 200)
    refused = sorted(answer.seconds for answer in answers if answer.status == 429)
    others = [answer.status for answer in answers if answer.status not in (200, 429)]
    shown = {
        "tokens_per_s": round(sum(answer.tokens for answer in answers) / duration),
        "served_per_s": round(len(served) / duration, 2),
        "p50_ms": round(statistics.median(served) * 1e3, 1),
        "p99_ms": round(p99(served) * 1e3, 1),
        "refused": len(refused),
        "other_answers": len(others),
    }
    return shown | ({"refusal_p99_ms": round(p99(refused) * 1e3, 1)} if refused else {})


async def _closed(
    running: Running, bodies: list[bytes], clients: int, seconds: float
) -> tuple[list[_Answer], float]:
    """Clients that send a request when the one before is answered, or a while after it was refused."""
    started = time.perf_counter()
    answers: list[_Answer] = []

    async def client(number: int) -> None:
        while time.perf_counter() - started < seconds:
            answer = await _send(running.session, bodies[number % len(bodies)])
            answers.append(answer)
            if answer.status != 200:
                await asyncio.sleep(_PAUSE_SECONDS)
            number += clients

    await asyncio.gather(*(client(number) for number in range(clients)))
    return _within(answers, started, seconds)


def _within(answers: list[_Answer], started: float, seconds: float) -> tuple[list[_Answer], float]:
    """Of all answers those that came between the time at which the queue is full and the end, and how long
    that is."""
    begin = started + _RAMP * seconds
    return [each for each in answers if begin <= each.came <= started + seconds], (1 - _RAMP) * seconds


async def _open(
    session: aiohttp.ClientSession, bodies: list[bytes], rate: float, seconds: float, draw: random.Random
) -> tuple[list[_Answer], float]:
    """Requests that come whatever becomes of those before."""
    started = time.perf_counter()
    tasks, due, number = [], 0.0, 0
    while due < seconds:
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        tasks.append(asyncio.create_task(_send(session, bodies[number % len(bodies)])))
        due += draw.expovariate(rate)
        number += 1
    return _within(await asyncio.gather(*tasks), started, seconds)


async def _send(session: aiohttp.ClientSession, body: bytes) -> _Answer:
    """The time is that from when all of the body is sent, by about: it is small, and sent at once."""
    started = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    async with session.post("/rerank", data=body, headers=headers) as response:
        content = await response.read()
        came = time.perf_counter()
        tokens = (
            msgspec.json.decode(content, type=_Served).usage.total_tokens if response.status == 200 else 0
        )
        return _Answer(response.status, came - started, came, tokens)


def _body(request: Request) -> bytes:
    given = {"query": request.query, "documents": request.documents, "return_documents": False}
    return msgspec.json.encode(given)
