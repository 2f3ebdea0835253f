"""`maxsimd bench overload`: a server beyond its capacity, the requests that it serves and refuses."""

import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import numpy as np

from maxsimd.bench.datasets import Request, docstring_requests
from maxsimd.bench.load import maxsimd, send_at_random
from maxsimd.bench.report import Figures

_DOCUMENTS = 20
CONCURRENCY = (2, 4, 8, 16, 32)
TIMES = (2, 5, 10)
_PAUSE_SECONDS = 0.25
# More refusals than this a served request mean that clients ask for more than the capacity.
_FEW_REFUSALS = 0.05
# The share of a measurement after which answers count.
_RAMP = 0.2


class _Usage(msgspec.Struct):
    total_tokens: int


class _Served(msgspec.Struct):
    usage: _Usage


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that `came` at a time of perf_counter, and the tokens that were run for it."""

    status: int
    seconds: float
    came: float
    tokens: int


class _Clients:
    """A pool of connections that parse as little HTTP as possible: clients share the server's cores."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, request: bytes) -> _Answer:
        # The server closes connections that are idle for long.
        while self._idle and self._idle[-1][0].at_eof():
            self._idle.pop()
        reader, writer = (
            self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        )
        started = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        content = await reader.readexactly(int(length))
        came = time.perf_counter()
        self._idle.append((reader, writer))
        status = int(head.split(b" ", 2)[1])
        tokens = msgspec.json.decode(content, type=_Served).usage.total_tokens if status == 200 else 0
        return _Answer(status, came - started, came, tokens)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def measure_overload(
    model: str | None, max_wait_seconds: float, seconds: float, seed: int = 0
) -> Figures:
    """Capacity is the best throughput of clients that wait for their answers, with few refusals. Then come
    several times as many requests, at random (Poisson), for `seconds` each. Capacity is measured again before
    each load: machines change their speed. Throughput is in tokens, because refusals depend on size."""
    requests = docstring_requests(200, _DOCUMENTS, seed)
    bodies = [_request(request) for request in requests]
    server = maxsimd("maxsimd", "--max-wait-seconds", str(max_wait_seconds))
    draw = random.Random(seed)
    figures: Figures = {"documents": _DOCUMENTS, "max_wait_seconds": max_wait_seconds}
    with tempfile.TemporaryDirectory() as folder:
        async with server.run(model, Path(folder, "log")) as running:
            clients = _Clients(running.port)
            await _closed(clients, bodies, 8, seconds / 4)
            by_number = {}
            for number in CONCURRENCY:
                by_number[number] = shown = _shown(*await _closed(clients, bodies, number, seconds / 4))
                compared = ("tokens_per_s", "p99_ms", "refused")
                figures |= {f"{name}_of_{number}_clients": shown[name] for name in compared}
            within = [
                number
                for number, shown in by_number.items()
                if shown["refused_per_s"] <= _FEW_REFUSALS * shown["served_per_s"]
            ]
            best = max(within or CONCURRENCY[:1], key=lambda number: by_number[number]["tokens_per_s"])
            answers, duration = list[_Answer](), 0.0
            overloaded: Figures = {}
            for times in TIMES:
                more, longer = await _closed(clients, bodies, best, seconds / 2)
                answers, duration = answers + more, duration + longer
                capacity = _shown(answers, duration)
                if not capacity["served_per_s"]:
                    raise click.ClickException("the server answered nothing in time; give more --seconds")
                rate = times * capacity["served_per_s"]
                started = time.perf_counter()
                came = await send_at_random(
                    lambda number: clients.send(bodies[number % len(bodies)]), rate, seconds, draw
                )
                served = _shown(*_within(came, started, seconds))
                overloaded |= {f"{name}_at_{times}_times": value for name, value in served.items()}
            clients.close()
    return figures | {"clients_at_capacity": best, **capacity} | overloaded


def _shown(answers: list[_Answer], duration: float) -> Figures:
    served, refused = (
        [answer.seconds * 1e3 for answer in answers if answer.status == status] for status in (200, 429)
    )
    p50, p99 = np.percentile(served or [np.nan], (50, 99))
    shown = {
        "tokens_per_s": round(sum(answer.tokens for answer in answers) / duration),
        "served_per_s": round(len(served) / duration, 2),
        "p50_ms": round(float(p50), 1),
        "p99_ms": round(float(p99), 1),
        "refused": len(refused),
        "refused_per_s": round(len(refused) / duration, 2),
        "other_answers": len(answers) - len(served) - len(refused),
    }
    return shown | ({"refusal_p99_ms": round(float(np.percentile(refused, 99)), 1)} if refused else {})


async def _closed(
    clients: _Clients, bodies: list[bytes], number: int, seconds: float
) -> tuple[list[_Answer], float]:
    """Clients that send a request when the one before is answered, or a while after it was refused."""
    started = time.perf_counter()
    answers: list[_Answer] = []

    async def client(next_body: int) -> None:
        while time.perf_counter() - started < seconds:
            answer = await clients.send(bodies[next_body % len(bodies)])
            answers.append(answer)
            if answer.status != 200:
                await asyncio.sleep(_PAUSE_SECONDS)
            next_body += number

    await asyncio.gather(*(client(i) for i in range(number)))
    return _within(answers, started, seconds)


def _within(answers: list[_Answer], started: float, seconds: float) -> tuple[list[_Answer], float]:
    """The answers between the ramp and the end, and the seconds between."""
    begin = started + _RAMP * seconds
    return [each for each in answers if begin <= each.came <= started + seconds], (1 - _RAMP) * seconds


def _request(request: Request) -> bytes:
    given = {"query": request.query, "documents": request.documents, "return_documents": False}
    body = msgspec.json.encode(given)
    return b"POST /rerank HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
