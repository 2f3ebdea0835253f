"""Thousands of idle and slow connections beside normal load: how long that load takes without them, while
they come in one burst and once they are there, in turns; and whether each is closed within its limit."""

import asyncio
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path

from tests.chaos.crowd import crowd
from tests.chaos.findings import Found, Row, percentile
from tests.chaos.running import ROOT, Running, running
from tests.chaos.traffic import Pool, Texts

_ROUNDS = 3
# How much later than its limit says a connection may be closed.
_LATE_SECONDS, _LATE_SHARE = 3.0, 0.1
_TURNS = ("alone", "while slow clients come", "beside slow clients")


async def _round(server: Running, count: int, window: float, limit: float) -> tuple[list[float], dict]:
    """When the load was alone, slow clients came, were there, and the turn was over; and what they saw."""
    moments = [time.monotonic()]
    await asyncio.sleep(window)
    moments.append(time.monotonic())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.slow", str(server.port), str(count), str(2 * limit)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        limit=1 << 24,
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        moments.append(time.monotonic())
        await asyncio.sleep(window)
        moments.append(time.monotonic())
        return moments, json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def sit_idle(server: Running, pool: Pool, count: int, window: float, limit: float) -> Found:
    """Normal load for `window` seconds, alone and beside slow clients, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        async with crowd(server.url, pool.save(Path(folder, "pool")), 1, "small") as clients:
            await asyncio.sleep(2.0)  # for its start
            rounds = [await _round(server, count, window, limit) for _ in range(_ROUNDS)]
    rows: list[Row] = [("normal requests", "number", "p50 ms", "p99 ms")]
    for turn, name in enumerate(_TURNS):
        waited = [
            1e3 * (record.done - record.sent)
            for record in clients.records
            if any(times[turn] <= record.sent and record.done <= times[turn + 1] for times, _ in rounds)
        ]
        rows.append((name, len(waited), percentile(waited, 0.5), percentile(waited, 0.99)))
    outcomes = Counter(record.outcome for record in clients.records).most_common()
    broken = [f"{record.kind}: {record.reason}" for record in clients.records if record.is_bad]
    latest = limit * (1 + _LATE_SHARE) + _LATE_SECONDS
    closed: list[Row] = [
        ("slow clients", "opened", "refused", "left open", "first closed s", "last closed s")
    ]
    for _, kinds in rounds:
        for kind, seen in kinds.items():
            first, last = min(seen["seconds"], default=None), max(seen["seconds"], default=None)
            closed.append((kind, seen["opened"], seen["refused"], seen["left_open"], first, last))
            if seen["left_open"] or (last or 0.0) > latest:
                broken.append(f"{kind} were not closed after {latest:.0f} s: {seen['left_open']}, {last}")
    return Found([rows, outcomes, closed], broken)


def run(options: Namespace) -> Found:
    """`--requests` is the number of slow connections, `--seconds` how long each turn is."""
    window = options.seconds or 15.0
    limit = 2 * window  # they are all open while the load is measured
    limits = [("--header-seconds", limit), ("--transfer-seconds", limit), ("--idle-seconds", limit)]
    arguments = [str(part) for pair in limits for part in pair]
    with running(options.model, "--log-level", "warning", *arguments) as server:
        pool = Pool.ask(Texts.draw(options.seed), server.url)
        return asyncio.run(sit_idle(server, pool, options.requests or 5000, window, limit))
