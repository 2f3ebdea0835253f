"""Thousands of idle and slow connections beside normal load: how long that load takes with and without
them, in turns, and whether each is closed within its limit."""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.client import Record
from tests.chaos.crowds import crowd
from tests.chaos.options import Options
from tests.chaos.pool import Pool, Texts
from tests.chaos.running import ROOT, Running, running
from tests.chaos.slow import Seen
from tests.chaos.tables import percentile, table
from tests.chaos.traffic import Outcome

_ROUNDS = 2
# How much later than its limit says a connection may be closed.
_LATE_SECONDS, _LATE_SHARE = 2.0, 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """What was sent in a while with or without slow clients, and what became of these."""

    begun: float
    ended: float
    slow: Mapping[str, Seen]

    def milliseconds(self, records: Sequence[Record]) -> list[float]:
        return [
            1e3 * (record.done - record.sent)
            for record in records
            if self.begun <= record.sent and record.done <= self.ended
        ]


@dataclass(frozen=True, slots=True)
class Report:
    limit: float
    turns: Sequence[Turn]
    records: Sequence[Record]

    @property
    def is_good(self) -> bool:
        bad = {Outcome.LOST.value, Outcome.WRONG.value}
        seen = [one for turn in self.turns for one in turn.slow.values()]
        closed = all(not one.left_open and max(one.seconds, default=0.0) <= self.latest for one in seen)
        return closed and not any(record.outcome in bad for record in self.records)

    @property
    def latest(self) -> float:
        return self.limit * (1 + _LATE_SHARE) + _LATE_SECONDS

    def lines(self) -> str:
        rows: list[Sequence[object]] = [("normal requests", "number", "p50 ms", "p99 ms")]
        closed: list[Sequence[object]] = [
            ("slow clients", "opened", "refused", "left open", "first closed s", "last closed s")
        ]
        for turn in self.turns:
            waited = turn.milliseconds(self.records)
            number = sum(one.opened for one in turn.slow.values())
            name = f"beside {number:,} slow clients" if turn.slow else "alone"
            rows.append((name, len(waited), percentile(waited, 0.5), percentile(waited, 0.99)))
            for kind, one in turn.slow.items():
                times = (min(one.seconds, default=None), max(one.seconds, default=None))
                closed.append((kind, one.opened, one.refused, one.left_open, *times))
        outcomes = {outcome.value: 0 for outcome in Outcome}
        for record in self.records:
            outcomes[record.outcome] += 1
        limits = f"each is to be closed after {self.limit:g} s, {self.latest:g} at the latest"
        return f"{table(rows)}\n{outcomes}\n\n{table(closed)}\n{limits}"


async def sit_idle(server: Running, pool: Pool, count: int, window: float, limit: float) -> Report:
    """Normal load for `window` seconds, alone and beside slow clients, in turns."""
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as folder:
        saved = pool.save(Path(folder, "pool"))
        load = ("--mix", "small", "--clients", "2", "--pause", "0.05")
        async with crowd(server.url, saved, 1, *load) as clients:
            await asyncio.sleep(2.0)  # for its start
            for _ in range(_ROUNDS):
                begun = time.monotonic()
                await asyncio.sleep(window)
                turns.append(Turn(begun, time.monotonic(), {}))
                turns.append(await _beside(server, count, window, limit))
    return Report(limit, turns, clients.records)


async def _beside(server: Running, count: int, window: float, limit: float) -> Turn:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.slow", str(server.port), str(count), str(2 * limit)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        limit=1 << 24,
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        begun = time.monotonic()
        await asyncio.sleep(window)
        ended = time.monotonic()
        found = json.loads(await process.stdout.readline())
        await process.wait()
        return Turn(begun, ended, {kind: Seen(**seen) for kind, seen in found.items()})
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def run(options: Options) -> int:
    """`--requests` is the number of slow connections, `--seconds` how long each turn is."""
    window = options.seconds or 15.0
    limit = 2 * window  # they are all open while the load is measured
    limits = [("--header-seconds", limit), ("--transfer-seconds", limit), ("--idle-seconds", limit)]
    arguments = [str(part) for pair in limits for part in pair]
    with running(options.checkpoint(), "--log-level", "warning", *arguments) as server:
        pool = Pool.ask(Texts.draw(options.seed), server.url)
        report = asyncio.run(sit_idle(server, pool, options.requests or 5000, window, limit))
    print(report.lines())
    return 0 if report.is_good else 1
