"""Mixed traffic while one thing after another goes wrong: nothing may be lost, and no answer wrong."""

import asyncio
import math
import random
import resource
import sqlite3
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
from scipy import stats

from maxsimd.bench.plots import save
from maxsimd.engine.cache.disk import FILE
from tests.chaos.crowd import Crowd, Record, crowd
from tests.chaos.disconnects import leave_often
from tests.chaos.findings import Found, Row, percentile
from tests.chaos.running import Running, running
from tests.chaos.traffic import Ask, Outcome, Pool, Texts, Verdict, malformed, rerank, send
from tests.damage import DAMAGES, heed_permissions

# Connections that stand still are cut within seconds, so that this happens too.
_LIMITS = ("header_seconds=3", "transfer_seconds=3", "min_bytes_per_second=1000", "cache_disk_mb=12")
_OPTIONS = ("--cache-mb", "1", "--log-level", "warning", *(f"--limit={each}" for each in _LIMITS))


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    begun: float
    over: float


class Disturber:
    """Does one thing after another to a server, and notes when each was over."""

    def __init__(self, server: Running, crowd: Crowd, pool: Pool, cache: Path, draw: random.Random) -> None:
        self.faults: list[Fault] = []
        self.records: list[Record] = []
        self._server, self._crowd, self._pool, self._cache, self._draw = server, crowd, pool, cache, draw
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "client stands still": self._stop_client, "clients leave": self._leave,
            "steps fail": partial(self._break_steps, "failing"),
            "steps lack memory": partial(self._break_steps, "out_of_memory"),
            "poisoned texts": self._poison, "malformed bodies": self._malformed,
            "cache cleared": self._clear_cache, "disk full": self._fill_disk,
            "cache truncated": partial(self._damage, "truncated to half"),
            "cache overwritten": partial(self._damage, "random bytes in the middle"),
            "cache deleted": partial(self._damage, "file deleted"),
            "cache read-only": self._forbid, "cache replaced": self._replace,
        }  # fmt: skip

    async def run(self, seconds: float, pause: float) -> None:
        """All kinds in random order, again and again, with a pause of about that long after each."""
        end = time.monotonic() + seconds
        while True:
            for kind in self._draw.sample(list(self._kinds), len(self._kinds)):
                await asyncio.sleep(self._draw.uniform(0.5, 1.5) * pause)
                if time.monotonic() > end:
                    return
                begun = time.monotonic()
                await self._kinds[kind]()
                self.faults.append(Fault(kind, begun, time.monotonic()))

    async def _for_a_while(self) -> None:
        await asyncio.sleep(self._draw.uniform(0.5, 2))

    async def _stop_client(self) -> None:
        number = self._draw.randrange(len(self._crowd.processes))
        await self._crowd.stand_still(number, self._draw.choice([0.2, 1.0, 5.0]))

    async def _leave(self) -> None:
        await leave_often(self._server, self._pool, 50, self._draw.randrange(1 << 30))

    async def _break_steps(self, how: str) -> None:
        await asyncio.to_thread(self._server.ask, "set", **{how: self._draw.choice([0.1, 0.5, 0.9])})
        await self._for_a_while()
        await asyncio.to_thread(self._server.ask, "set", **{how: 0.0})

    async def _poison(self) -> None:
        options = {"on_error": "report", "cache": "bypass"}
        await self._send([rerank(self._pool, self._draw, 100, 20, options) for _ in range(2)])

    async def _malformed(self) -> None:
        await self._send([malformed(self._pool, self._draw) for _ in range(30)])

    async def _send(self, asks: list[Ask]) -> None:
        sent = time.monotonic()
        async with aiohttp.ClientSession(self._server.url) as session:
            try:
                answers = await asyncio.gather(*(send(session, ask) for ask in asks))
            except aiohttp.ClientError as error:
                answers = [(0, Verdict(Outcome.LOST, repr(error)))]
        self._note(sent, answers)

    async def _clear_cache(self) -> None:
        sent = time.monotonic()
        async with aiohttp.ClientSession(self._server.url) as session, session.delete("/cache") as response:
            outcome = Outcome.RIGHT if response.status == 204 else Outcome.WRONG
        self._note(sent, [(response.status, Verdict(outcome, f"DELETE /cache: {response.status}"))])

    def _note(self, sent: float, answers: list[tuple[int, Verdict]]) -> None:
        done = time.monotonic()
        self.records += [
            Record("of a fault", sent, done, verdict.outcome.value, verdict.reason, status)
            for status, verdict in answers
        ]

    async def _fill_disk(self) -> None:
        """As if it were full: no file of the server grows beyond a few pages."""
        pid = self._server.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 14, hard))
        try:
            await self._for_a_while()
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

    async def _damage(self, name: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                while not (self._cache / FILE).exists():
                    await asyncio.sleep(0.05)
        with suppress(OSError, sqlite3.Error):  # there was none, or a journal is gone again
            DAMAGES[name](self._cache)

    async def _forbid(self) -> None:
        await self._damage("read-only")
        try:
            await self._for_a_while()
        finally:
            self._cache.chmod(0o755)
            for path in self._cache.iterdir():
                with suppress(FileNotFoundError):
                    path.chmod(0o644)

    async def _replace(self) -> None:
        """Puts another program's file in the cache's place. The server leaves it alone until it is gone."""
        await self._damage("file replaced by another program's")
        await self._for_a_while()
        (self._cache / FILE).unlink(missing_ok=True)


_BLOCKS = 20
_FEWEST = 3 * _BLOCKS


@dataclass(frozen=True, slots=True)
class Sample:
    """`seconds` since the start; latencies in milliseconds, of answers since the sample before."""

    seconds: float
    resident_mb: float
    malloc_mb: float
    blocks: float
    descriptors: float
    tasks: float
    p50_ms: float
    p99_ms: float


async def watch(server: Running, records: list[Record], samples: list[Sample]) -> None:
    """Looks at a server every second, until cancelled. What is not known is NaN."""
    started, seen = time.monotonic(), 0
    while True:
        await asyncio.sleep(1)
        state = await asyncio.to_thread(server.state)
        new = records[seen:]
        seen += len(new)
        waited = [1e3 * (one.done - one.sent) for one in new if one.outcome == Outcome.RIGHT.value]
        latencies = [percentile(waited, share) or math.nan for share in (0.5, 0.99)]
        memory = [each / (1 << 20) for each in (server.resident_bytes, state.malloc_bytes or math.nan)]
        held = state.blocks, state.descriptors, state.tasks
        samples.append(Sample(time.monotonic() - started, *memory, *held, *latencies))


def trend(samples: Sequence[Sample], name: str) -> str:
    """The growth of a value's least per hour, in the second half, with half of its 95 % confidence interval.

    The least of each block leaves out what requests hold at a moment. Blocks resemble each other, so the
    error is that of fewer blocks (Santer et al., Journal of Geophysical Research 105(D6), 2000, section
    3)."""
    half = samples[len(samples) // 2 :]
    if len(half) < _FEWEST:
        return "not known"
    curve = np.array([[sample.seconds / 3600, getattr(sample, name)] for sample in half])
    blocks = np.array_split(curve, _BLOCKS)
    hours = np.array([block[:, 0].mean() for block in blocks])
    least = np.array([block[:, 1].min() for block in blocks])
    fit = stats.linregress(hours, least)
    left = least - (fit.intercept + fit.slope * hours)
    # Residuals that do not vary at all say nothing of each other.
    alike = max(0.0, float(left[1:] @ left[:-1] / (left @ left)) if left.any() else 0.0)
    independent = max(3.0, _BLOCKS * (1 - alike) / (1 + alike))
    error = fit.stderr * math.sqrt((_BLOCKS - 2) / (independent - 2))
    return f"{fit.slope:+,.1f} ± {stats.t.ppf(0.975, independent - 2) * error:,.1f}"


_PANELS = {
    "memory, MiB": {"resident_mb": "resident", "malloc_mb": "allocated in C"},
    "descriptors": {"descriptors": ""},
    "tasks": {"tasks": ""},
    "latency, ms": {"p50_ms": "median", "p99_ms": "99th percentile"},
}


def draw(samples: Sequence[Sample], faults: Sequence[float], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "maxsimd"
    from matplotlib import pyplot

    minutes = [sample.seconds / 60 for sample in samples]
    figure, rows = pyplot.subplots(len(_PANELS), 1, figsize=(7, 8), layout="constrained", sharex=True)
    for axes, (label, lines) in zip(rows, _PANELS.items(), strict=True):
        for name, shown in lines.items():
            axes.plot(minutes, [getattr(sample, name) for sample in samples], linewidth=1, label=shown)
        # At the foot of the panel; one line of marks takes less room in the file than a line each.
        moments, place = [seconds / 60 for seconds in faults], axes.get_xaxis_transform()
        axes.plot(moments, [0.02] * len(moments), "|", color="tab:red", markeredgewidth=0.5, transform=place)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel(label)
        if len(lines) > 1:
            axes.legend(frameon=False)
        if "ms" in label:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    rows[-1].set_xlabel("minutes (red: a fault)")
    return save(figure, path)


@dataclass(frozen=True, slots=True)
class Report:
    """All that was seen; `ended` is the server's exit status, and `held` what its engine held in the end."""

    records: Sequence[Record]
    faults: Sequence[Fault]
    samples: Sequence[Sample]
    log: str
    started: float
    held: Mapping[str, int]
    ended: int

    def count(self, outcome: Outcome) -> int:
        return sum(record.outcome == outcome.value for record in self.records)

    def broken(self) -> list[str]:
        broken = [f"{record.kind}: {record.reason}" for record in self.records if record.is_bad]
        if self.held:
            broken.append(f"the engine holds {self.held}")
        if self.ended != 0:
            broken.append(f"the server ended with {self.ended}:\n{self.log[-2000:]}")
        return broken

    def recoveries(self) -> dict[str, list[float]]:
        """By kind of fault, the seconds from each end to the next right answer to a new request."""
        right = [(record.sent, record.done) for record in self.records if record.outcome == "right"]
        sent, done = np.array(right or [(0.0, np.inf)]).T
        found: dict[str, list[float]] = {}
        for fault in self.faults:
            first = float(done[sent >= fault.over].min(initial=np.inf))
            found.setdefault(fault.kind, []).append(first - fault.over)
        return found

    def found(self) -> Found:
        counts: list[Row] = [("requests sent", len(self.records))]
        counts += [(outcome.value, self.count(outcome)) for outcome in Outcome]
        kinds = Counter(record.kind for record in self.records).most_common()
        statuses = Counter(record.status for record in self.records if record.outcome == "refused")
        refused = [(f"refused with {status}", count) for status, count in statuses.most_common()]
        faults: list[Row] = [("until the next right answer after a fault", "times", "median s", "longest s")]
        faults += [
            (kind, len(seconds), percentile(seconds, 0.5), max(seconds))
            for kind, seconds in sorted(self.recoveries().items())
        ]
        memory: list[Row] = [("of the server", "at first", "at last", "an hour, in the second half")]
        for name in ("resident_mb", "malloc_mb", "blocks", "descriptors", "tasks"):
            first, last = (getattr(self.samples[i], name) for i in (0, -1))
            memory.append((name, first, last, trend(self.samples, name)))
        return Found([counts, kinds, *([refused] if refused else []), faults, memory], self.broken())


async def disturb(
    model: str, pool: Pool, seconds: float, *, seed: int = 0, processes: int = 3, pause: float = 2.0
) -> Report:
    with tempfile.TemporaryDirectory() as temporary:
        cache = Path(temporary) / "cache"
        cache.mkdir()
        saved = pool.save(Path(temporary) / "pool")
        options = (*_OPTIONS, "--cache-dir", str(cache))
        with running(model, *options, before=heed_permissions) as server:
            async with crowd(server.url, saved, processes, "mixed") as clients:
                samples: list[Sample] = []
                watching = asyncio.create_task(watch(server, clients.records, samples))
                started = time.monotonic()
                disturber = Disturber(server, clients, pool, cache, random.Random(seed))
                while not clients.records:  # their processes are starting
                    await asyncio.sleep(0.05)
                await disturber.run(seconds, pause)
                await asyncio.sleep(pause)  # for what comes after the last fault
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
            held = server.settled().held
            ended = server.terminate()
            return Report(
                *([*clients.judged(), *disturber.records], disturber.faults, samples),
                *(server.log, started, held, ended),
            )


def run(options: Namespace) -> Found:
    with running(options.model, "--cache-mb", "64", hooked=False) as undisturbed:
        pool = Pool.ask(Texts.draw(options.seed), undisturbed.url)
    report = asyncio.run(disturb(options.model, pool, options.seconds or 60, seed=options.seed))
    if options.plot is not None:
        print(draw(report.samples, [fault.begun - report.started for fault in report.faults], options.plot))
    return report.found()
