"""Processes of clients under load: `python -m tests.chaos.crowd URL POOL SEED MIX`.

Each draws requests until its standard input ends, and prints a line of JSON for each that is over."""

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp

from tests.chaos.running import ROOT
from tests.chaos.traffic import Ask, Outcome, Pool, Verdict, draw_ask, rerank, send

# Longer than any request should take here, however much is wrong.
_PATIENCE_SECONDS = 60.0
# For how long after a client went on something may still be wrong with its connections.
_RECOVERY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Mix:
    """The requests of a process's clients, their pauses in seconds, and the share that they abandon."""

    draw: Callable[[Pool, random.Random], Ask]
    clients: int
    pause: float
    abandoned: float


_MIXES = {
    "mixed": Mix(draw_ask, 4, 0.02, 0.03),
    "small": Mix(lambda pool, draw: rerank(pool, draw, 20), 2, 0.05, 0.0),
}


@dataclass(frozen=True, slots=True)
class Record:
    """A request and its answer. Times are those of the monotonic clock, which all processes share."""

    kind: str
    sent: float
    done: float
    outcome: str
    reason: str
    status: int
    client: int = 0

    @property
    def is_bad(self) -> bool:
        return self.outcome in (Outcome.LOST.value, Outcome.WRONG.value)


class Crowd:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.processes: list[asyncio.subprocess.Process] = []
        # By process, when it stood still: from, to.
        self._stops: list[list[tuple[float, float]]] = []

    async def start(self, url: str, pool: Path, mix: str) -> None:
        command = sys.executable, "-m", "tests.chaos.crowd", url, str(pool), str(len(self.processes)), mix
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT)
        self.processes.append(process)
        self._stops.append([])

    async def collect(self, number: int) -> None:
        reported = self.processes[number].stdout
        assert reported is not None
        async for line in reported:
            self.records.append(replace(Record(**json.loads(line)), client=number))

    async def stand_still(self, number: int, seconds: float) -> None:
        """Stops a process for a while, as a machine does that is overloaded or a notebook that is closed."""
        begun = time.monotonic()
        self.processes[number].send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.processes[number].send_signal(signal.SIGCONT)
        self._stops[number].append((begun, time.monotonic()))

    def judged(self) -> list[Record]:
        """The records, where what a client lost because it stood still counts as abandoned."""
        judged = []
        for each in self.records:
            stops = [(begun, end + _RECOVERY_SECONDS) for begun, end in self._stops[each.client]]
            is_disturbed = any(each.sent < end and begun < each.done for begun, end in stops)
            is_lost = each.outcome == Outcome.LOST.value or each.status == 408
            judged.append(replace(each, outcome="abandoned") if is_lost and is_disturbed else each)
        return judged


@asynccontextmanager
async def crowd(url: str, pool: Path, processes: int, mix: str) -> AsyncIterator[Crowd]:
    crowd = Crowd()
    try:
        for _ in range(processes):
            await crowd.start(url, pool, mix)
        async with asyncio.TaskGroup() as group:
            for number in range(processes):
                group.create_task(crowd.collect(number))
            yield crowd
            for process in crowd.processes:
                assert process.stdin is not None
                process.stdin.close()
    finally:
        for process in crowd.processes:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()


# The rest of this file runs in the clients' processes.


async def _client(
    session: aiohttp.ClientSession, pool: Pool, mix: Mix, draw: random.Random, is_over: asyncio.Event
) -> None:
    while not is_over.is_set():
        ask = mix.draw(pool, draw)
        abandons = draw.random() < mix.abandoned
        patience = draw.expovariate(50) if abandons else _PATIENCE_SECONDS
        sent = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                status, verdict = await send(session, ask)
        except TimeoutError:
            outcome = Outcome.ABANDONED if abandons else Outcome.LOST
            status, verdict = 0, Verdict(outcome, f"nothing in {patience} s")
        except (aiohttp.ClientError, OSError) as error:
            status, verdict = 0, Verdict(Outcome.LOST, repr(error))
        done = time.monotonic()
        record = Record(ask.kind, sent, done, verdict.outcome.value, verdict.reason, status)
        print(json.dumps(asdict(record)), flush=True)
        await asyncio.sleep(draw.expovariate(1 / mix.pause))


async def _main(url: str, pool_file: str, seed: str, name: str) -> None:
    pool, mix, is_over = Pool.load(Path(pool_file)), _MIXES[name], asyncio.Event()
    connector = aiohttp.TCPConnector(limit=mix.clients, keepalive_timeout=5)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        for number in range(mix.clients):
            group.create_task(_client(session, pool, mix, random.Random(f"{seed} {number}"), is_over))
        await asyncio.to_thread(sys.stdin.read)
        is_over.set()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
