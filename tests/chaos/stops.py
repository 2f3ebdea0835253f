"""SIGTERM at a random moment under load: what was accepted is answered, and the server exits well in time."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tests.chaos.options import Options
from tests.chaos.pool import Pool, Texts
from tests.chaos.running import Running, running
from tests.chaos.tables import percentile, table
from tests.chaos.traffic import Ask, Outcome, Verdict, error_mismatch, rerank

GRACE_SECONDS = 20.0
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
    """One server's end. A request that was sent after the signal may find nobody there; one that was sent
    before it is lost without an answer."""

    asked: float
    seconds: float
    status: int
    requests: Sequence[Request]

    @property
    def lost(self) -> int:
        return sum(one.verdict is None and one.sent < self.asked for one in self.requests)

    @property
    def too_late(self) -> int:
        return sum(one.verdict is None and one.sent >= self.asked for one in self.requests)

    @property
    def wrong(self) -> list[str]:
        verdicts = [one.verdict for one in self.requests if one.verdict is not None]
        return [verdict.reason for verdict in verdicts if verdict.outcome is Outcome.WRONG]

    @property
    def is_good(self) -> bool:
        in_time = self.seconds <= GRACE_SECONDS + _LEAVING_SECONDS
        return self.status == 0 and in_time and not self.lost and not self.wrong


async def stop(server: Running, pool: Pool, seed: int) -> Stop:
    """Puts a server under load, ends it, and says what became of the requests."""
    draw = random.Random(seed)
    requests: list[Request] = []
    async with asyncio.TaskGroup() as group:
        for number in range(_CLIENTS):
            group.create_task(_client(server, pool, random.Random(f"{seed} {number}"), requests))
        await asyncio.sleep(draw.uniform(0.05, 1.5))
        asked = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(server.process.wait, 120)
        seconds = time.monotonic() - asked
    return Stop(asked, seconds, status, requests)


async def _client(server: Running, pool: Pool, draw: random.Random, requests: list[Request]) -> None:
    """A request after the other on one connection, and on another when the server closes it, until it takes
    no more connections."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        except OSError:
            return
        try:
            while True:
                request, is_open = await _one(reader, writer, _draw(pool, draw))
                requests.append(request)
                if not is_open:
                    break
                await asyncio.sleep(draw.choice([0, 0, 0.01, 0.1]))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _draw(pool: Pool, draw: random.Random) -> Ask:
    return rerank(pool, draw, min(100, int(draw.paretovariate(0.6))), options={"cache": "bypass"})


async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: Ask) -> tuple[Request, bool]:
    """Sends a request; says what came, and whether the connection stays open."""
    head = f"POST {ask.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(ask.body)}\r\n\r\n"
    writer.write(head.encode() + ask.body)
    with suppress(OSError):
        await writer.drain()
    # Bodies are smaller than the system's buffers, so that all of it is out of our hands.
    sent = time.monotonic()
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        body = await reader.readexactly(int(headers["content-length"]))
    except (OSError, asyncio.IncompleteReadError):
        return Request(sent, None), False
    status = int(lines[0].split()[1])
    if status == 503:
        wrong = error_mismatch(status, headers, body)
        verdict = Verdict(Outcome.REFUSED) if wrong is None else Verdict(Outcome.WRONG, wrong)
    else:
        verdict = ask.judge(status, headers, body)
    return Request(sent, verdict, status), headers.get("connection") != "close"


def lines(stops: Sequence[Stop]) -> str:
    statuses = Counter(request.status for stop in stops for request in stop.requests if request.status)
    seconds = [stop.seconds for stop in stops]
    rows: list[Sequence[object]] = [
        ("stops", len(stops)),
        ("of these with exit status 0", sum(stop.status == 0 for stop in stops)),
        ("median seconds from the signal to the end", percentile(seconds, 0.5)),
        ("longest", max(seconds)),
        *((f"requests answered {status}", count) for status, count in sorted(statuses.items())),
        ("answers that were wrong", sum(len(stop.wrong) for stop in stops)),
        ("sent before the signal, not answered", sum(stop.lost for stop in stops)),
        ("sent after it, to nobody", sum(stop.too_late for stop in stops)),
    ]
    return "\n".join([table(rows), *[reason for stop in stops for reason in stop.wrong][:10]])


def run(options: Options) -> int:
    """`--requests` is the number of stops."""
    model, stops, pool = options.checkpoint(), [], None
    arguments = ("--cache-mb", "64", "--grace-seconds", str(GRACE_SECONDS))
    for number in range(options.requests or 50):
        with running(model, *arguments, hooked=False) as server:
            pool = pool or Pool.ask(Texts.draw(options.seed), server.url)
            stops.append(asyncio.run(stop(server, pool, options.seed * 1000 + number)))
    print(lines(stops))
    return 0 if all(stop.is_good for stop in stops) else 1
