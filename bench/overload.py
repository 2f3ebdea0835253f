"""A server of its own beyond what it can do: what it serves, how fast, and how fast it refuses the rest."""

import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from maxsimd.bench.datasets import Request, docstring_requests
from maxsimd.bench.load import p99
from maxsimd.bench.peers.systems import maxsimd

_DOCUMENTS = 20
CONCURRENCY = (2, 4, 8, 16, 32)
TIMES = (2, 5, 10)
_PAUSE_SECONDS = 0.25
# With more refusals than this for each request that is served, clients ask for more than the capacity.
_FEW_REFUSALS = 0.05
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


class _Connection(asyncio.Protocol):
    """Sends one request at a time and reads as little of HTTP as it takes: the clients work on the server's
    cores, and what they need for each of thousands of refusals it lacks."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._read = b""
        self._answer: asyncio.Future[tuple[bytes, bytes, float]] | None = None
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's are of classes of their own

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, end, content = self._read.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if end and len(content) >= int(length) and self._answer is not None:
            self._read = b""
            self._answer.set_result((head, content, time.perf_counter()))

    async def send(self, request: bytes) -> _Answer:
        """The time is that from when all of the request is sent, by about: it is small, and sent at once."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.write(request)
        head, content, came = await self._answer
        status = int(head.split(b" ", 2)[1])
        tokens = msgspec.json.decode(content, type=_Served).usage.total_tokens if status == 200 else 0
        return _Answer(status, came - started, came, tokens)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Clients:
    """Connections that are used again."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._idle: list[_Connection] = []

    async def send(self, request: bytes) -> _Answer:
        # Of those that are not used for long the server closes some.
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        if self._idle:
            connection = self._idle.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        answer = await connection.send(request)
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


async def measure_overload(
    model: str | None, wait_seconds: float, seconds: float, seed: int = 0
) -> dict[str, Any]:
    """Capacity is the throughput of those clients that get most when each waits for its answer, as long as
    next to nothing is refused; then requests come at random moments (Poisson), at several times that rate,
    for `seconds` each. Before each load capacity is measured again, because machines change their speed.
    Throughput is in tokens: whether a request is refused depends on its size, so that answers a second would
    say more of sizes than of the server."""
    requests = docstring_requests(200, _DOCUMENTS, seed)
    bodies = [_request(request) for request in requests]
    server = maxsimd("maxsimd", "--max-wait-seconds", str(wait_seconds))
    draw = random.Random(seed)
    figures: dict[str, Any] = {"documents": _DOCUMENTS, "max_wait_seconds": wait_seconds}
    with tempfile.TemporaryDirectory() as folder:
        async with server.run(model, Path(folder, "log")) as running:
            clients = _Clients(str(running.session._base_url))
            await _closed(clients, bodies, 8, seconds / 4)
            by_number = {}
            for number in CONCURRENCY:
                by_number[number] = shown = _shown(*await _closed(clients, bodies, number, seconds / 4))
                compared = ("tokens_per_s", "p99_ms", "refused")
                figures |= {f"{name}_of_{number}_clients": shown[name] for name in compared}
            best = max(by_number, key=lambda number: _within_capacity(by_number[number]))
            answers, duration = list[_Answer](), 0.0
            overloaded: dict[str, Any] = {}
            for times in TIMES:
                more, longer = await _closed(clients, bodies, best, seconds / 2)
                answers, duration = answers + more, duration + longer
                capacity = _shown(answers, duration)
                served = _shown(
                    *await _open(clients, bodies, times * capacity["served_per_s"], seconds, draw)
                )
                overloaded |= {f"{name}_at_{times}_times": value for name, value in served.items()}
            clients.close()
    return figures | {"clients_at_capacity": best, **capacity} | overloaded


def _within_capacity(shown: dict[str, Any]) -> float:
    """Tokens a second where few requests are refused, 0 where more are: those clients ask for too much."""
    served = shown["served_per_s"]
    return float(shown["tokens_per_s"]) if shown["refused_per_s"] <= _FEW_REFUSALS * served else 0.0


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
        "refused_per_s": round(len(refused) / duration, 2),
        "other_answers": len(others),
    }
    return shown | ({"refusal_p99_ms": round(p99(refused) * 1e3, 1)} if refused else {})


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
    """Of all answers those that came between the time at which the queue is full and the end, and how long
    that is."""
    begin = started + _RAMP * seconds
    return [each for each in answers if begin <= each.came <= started + seconds], (1 - _RAMP) * seconds


async def _open(
    clients: _Clients, bodies: list[bytes], rate: float, seconds: float, draw: random.Random
) -> tuple[list[_Answer], float]:
    """Requests that come whatever becomes of those before."""
    started = time.perf_counter()
    tasks, due, number = [], 0.0, 0
    while due < seconds:
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        tasks.append(asyncio.create_task(clients.send(bodies[number % len(bodies)])))
        due += draw.expovariate(rate)
        number += 1
    return _within(await asyncio.gather(*tasks), started, seconds)


def _request(request: Request) -> bytes:
    given = {"query": request.query, "documents": request.documents, "return_documents": False}
    body = msgspec.json.encode(given)
    return b"POST /rerank HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
