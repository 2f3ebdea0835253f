"""SIGTERM at a random moment under load: what was accepted is answered, and the server exits well in time."""

import asyncio
import random
import signal
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tests.chaos.findings import Found, Row, percentile
from tests.chaos.running import Running, running
from tests.chaos.traffic import Ask, Outcome, Pool, Texts, Verdict, judge_refusal, read_answer, rerank

_GRACE_SECONDS = 20.0
# Beyond the grace period: a step that is on the device is finished, and threads are ended.
_LEAVING_SECONDS = 5.0
_CLIENTS = 8


@dataclass(frozen=True, slots=True)
class Request:
    """When the last byte had been handed over, and what came; None where nothing did."""

    sent: float
    verdict: Verdict | None
    status: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """One server's end. Requests sent before the signal must be answered."""

    asked: float
    seconds: float
    status: int
    requests: Sequence[Request]

    @property
    def broken(self) -> list[str]:
        verdicts = [one.verdict for one in self.requests if one.verdict is not None]
        broken = [verdict.reason for verdict in verdicts if verdict.outcome is Outcome.WRONG]
        lost = sum(one.verdict is None and one.sent < self.asked for one in self.requests)
        if lost:
            broken.append(f"{lost} requests were sent before the signal and not answered")
        if self.status != 0 or self.seconds > _GRACE_SECONDS + _LEAVING_SECONDS:
            broken.append(f"it ended with status {self.status} after {self.seconds:.1f} s")
        return broken


async def stop(server: Running, pool: Pool, seed: int) -> Stop:
    requests: list[Request] = []
    async with asyncio.TaskGroup() as group:
        for number in range(_CLIENTS):
            group.create_task(_client(server, pool, random.Random(f"{seed} {number}"), requests))
        await asyncio.sleep(random.Random(seed).uniform(0.05, 1.5))
        asked = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(server.process.wait, 120)
        seconds = time.monotonic() - asked
    return Stop(asked, seconds, status, requests)


async def _client(server: Running, pool: Pool, draw: random.Random, requests: list[Request]) -> None:
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        except OSError:
            return
        is_open = True
        while is_open:
            documents = min(100, int(draw.paretovariate(0.6)))
            ask = rerank(pool, draw, documents, options={"cache": "bypass"})
            request, is_open = await _one(reader, writer, ask)
            requests.append(request)
            await asyncio.sleep(draw.choice([0, 0, 0.01, 0.1]) if is_open else 0)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: Ask) -> tuple[Request, bool]:
    """Sends a request; says what came, and whether the connection stays open."""
    head = f"POST {ask.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(ask.body)}\r\n\r\n"
    writer.write(head.encode() + ask.body)
    with suppress(OSError):
        await writer.drain()
    # Bodies are smaller than the system's buffers, so that all of it is out of our hands.
    sent = time.monotonic()
    try:
        status, headers, body = await read_answer(reader)
    except (OSError, asyncio.IncompleteReadError):
        return Request(sent, None), False
    judge = partial(judge_refusal, {503}) if status == 503 else ask.judge
    return Request(sent, judge(status, headers, body), status), headers.get("connection") != "close"


def run(options: Namespace) -> Found:
    """`--requests` is the number of stops."""
    stops, pool = [], None
    arguments = ("--cache-mb", "64", "--grace-seconds", str(_GRACE_SECONDS))
    for number in range(options.requests or 50):
        with running(options.model, *arguments, hooked=False) as server:
            pool = pool or Pool.ask(Texts.draw(options.seed), server.url)
            stops.append(asyncio.run(stop(server, pool, options.seed * 1000 + number)))
    statuses = Counter(request.status for stop in stops for request in stop.requests)
    seconds = [stop.seconds for stop in stops]
    rows: list[Row] = [("stops", len(stops)), ("requests sent to nobody", statuses.pop(0, 0))]
    rows += [(f"requests answered {status}", count) for status, count in sorted(statuses.items())]
    rows.append(("seconds from signal to end: median, longest", percentile(seconds, 0.5), max(seconds)))
    return Found([rows], [reason for stop in stops for reason in stop.broken])
