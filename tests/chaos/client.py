"""A process with several clients that share connections: `python -m tests.chaos.client URL POOL`. Draws
requests until its standard input ends, and prints a line of JSON for each that is over."""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.pool import Pool
from tests.chaos.traffic import Ask, Outcome, Verdict, draw_ask, draw_small

# Longer than any request should take here, however much is wrong.
PATIENCE_SECONDS = 60.0
_MIXES: dict[str, Callable[[Pool, random.Random], Ask]] = {"mixed": draw_ask, "small": draw_small}


@dataclass(frozen=True, slots=True)
class Record:
    """What became of a request; times by the monotonic clock, which all processes share."""

    kind: str
    sent: float
    done: float
    outcome: str
    reason: str
    status: int
    client: int = 0


class Clients:
    def __init__(self, session: aiohttp.ClientSession, pool: Pool, options: Any) -> None:
        self._session = session
        self._pool = pool
        self._ask = _MIXES[options.mix]
        self._pause = options.pause
        self._abandoned = options.abandoned
        self._is_over = asyncio.Event()

    async def until_input_ends(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), self._is_over.set)
        await self._is_over.wait()
        loop.remove_reader(sys.stdin.fileno())

    async def run(self, draw: random.Random) -> None:
        """One client: a request after the other."""
        while not self._is_over.is_set():
            print(json.dumps(asdict(await self._one(draw))), flush=True)
            await asyncio.sleep(draw.expovariate(1 / self._pause) if self._pause else 0)

    async def _one(self, draw: random.Random) -> Record:
        ask = self._ask(self._pool, draw)
        patience = PATIENCE_SECONDS
        if abandons := draw.random() < self._abandoned:
            patience = draw.expovariate(50)
        sent = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                status, verdict = await send(self._session, ask)
        except TimeoutError:
            outcome = Outcome.ABANDONED if abandons else Outcome.LOST
            status, verdict = 0, Verdict(outcome, f"nothing in {patience} s")
        except (aiohttp.ClientError, OSError) as error:
            status, verdict = 0, Verdict(Outcome.LOST, repr(error))
        return Record(ask.kind, sent, time.monotonic(), verdict.outcome.value, verdict.reason, status)


async def send(session: aiohttp.ClientSession, ask: Ask) -> tuple[int, Verdict]:
    """Sends a request and judges the answer."""
    headers = {"Content-Type": "application/json"}
    async with session.post(ask.path, data=ask.body, headers=headers) as response:
        body = await response.read()
        named = {name.lower(): value for name, value in response.headers.items()}
        return response.status, ask.judge(response.status, named, body)


async def _main(options: Any) -> None:
    pool = Pool.load(options.pool)
    connector = aiohttp.TCPConnector(limit=options.clients, keepalive_timeout=5)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(options.url, connector=connector, timeout=timeout) as session:
        clients = Clients(session, pool, options)
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.until_input_ends())
            for number in range(options.clients):
                group.create_task(clients.run(random.Random(f"{options.seed} {number}")))


def arguments(options: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("pool", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--mix", choices=list(_MIXES), default="mixed")
    parser.add_argument("--pause", type=float, default=0.02, help="mean seconds between a client's requests")
    parser.add_argument("--abandoned", type=float, default=0.0, help="share of requests that clients abandon")
    return parser.parse_args(options)


if __name__ == "__main__":
    asyncio.run(_main(arguments()))
