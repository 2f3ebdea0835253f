"""Thousands of idle and slow connections beside normal load: how long that load takes without them, while
they come in one burst and once they are there, in turns; and whether each is closed within its limit."""

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

_ROUNDS = 3
# How much later than its limit says a connection may be closed.
_LATE_SECONDS, _LATE_SHARE = 2.0, 0.1


@dataclass(frozen=True, slots=True)
class Round:
    """When the load was alone, slow clients came, and they were there; and what became of these."""

    alone: tuple[float, float]
    coming: tuple[float, float]
    beside: tuple[float, float]
    slow: Mapping[str, Seen]


@dataclass(frozen=True, slots=True)
class Report:
    limit: float
    rounds: Sequence[Round]
    records: Sequence[Record]

    @property
    def is_good(self) -> bool:
        bad = {Outcome.LOST.value, Outcome.WRONG.value}
        seen = [one for each in self.rounds for one in each.slow.values()]
        closed = all(not one.left_open and max(one.seconds, default=0.0) <= self.latest for one in seen)
        return closed and not any(record.outcome in bad for record in self.records)

    @property
    def latest(self) -> float:
        return self.limit * (1 + _LATE_SHARE) + _LATE_SECONDS

    def lines(self) -> str:
        rows: list[Sequence[object]] = [
            ("normal requests", "number", "p50 ms", "p99 ms"),
            self._row("alone", [each.alone for each in self.rounds]),
            self._row("while slow clients come", [each.coming for each in self.rounds]),
            self._row("beside slow clients", [each.beside for each in self.rounds]),
        ]
        closed: list[Sequence[object]] = [
            ("slow clients", "opened", "refused", "left open", "first closed s", "last closed s")
        ]
        for each in self.rounds:
            for kind, one in each.slow.items():
                times = (min(one.seconds, default=None), max(one.seconds, default=None))
                closed.append((kind, one.opened, one.refused, one.left_open, *times))
        outcomes = {outcome.value: 0 for outcome in Outcome}
        for record in self.records:
            outcomes[record.outcome] += 1
        limits = f"each is to be closed after {self.limit:g} s, {self.latest:g} at the latest"
        return f"{table(rows)}\n{outcomes}\n\n{table(closed)}\n{limits}"

    def _row(self, name: str, spans: Sequence[tuple[float, float]]) -> Sequence[object]:
        waited = [
            1e3 * (record.done - record.sent)
            for record in self.records
            if any(begun <= record.sent and record.done <= ended for begun, ended in spans)
        ]
        return name, len(waited), percentile(waited, 0.5), percentile(waited, 0.99)


async def sit_idle(server: Running, pool: Pool, count: int, window: float, limit: float) -> Report:
    """Normal load for `window` seconds, alone and beside slow clients, in turns."""
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        saved = pool.save(Path(folder, "pool"))
        load = ("--mix", "small", "--clients", "2", "--pause", "0.05")
        async with crowd(server.url, saved, 1, *load) as clients:
            await asyncio.sleep(2.0)  # for its start
            for _ in range(_ROUNDS):
                rounds.append(await _round(server, count, window, limit))
    return Report(limit, rounds, clients.records)


async def _round(server: Running, count: int, window: float, limit: float) -> Round:
    begun = time.monotonic()
    await asyncio.sleep(window)
    come = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.slow", str(server.port), str(count), str(2 * limit)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        limit=1 << 24,
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        there = time.monotonic()
        await asyncio.sleep(window)
        ended = time.monotonic()
        found = json.loads(await process.stdout.readline())
        await process.wait()
        slow = {kind: Seen(**seen) for kind, seen in found.items()}
        return Round((begun, come), (come, there), (there, ended), slow)
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
