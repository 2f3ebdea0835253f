"""Mixed traffic while one thing after another goes wrong: nothing may be lost, and no answer wrong."""

import asyncio
import bisect
import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.client import Record
from tests.chaos.crowds import crowd
from tests.chaos.disks import disk_that_can_be_full
from tests.chaos.disturbances import Disturber, Fault
from tests.chaos.options import Options
from tests.chaos.pool import Pool, Texts
from tests.chaos.running import Running, running
from tests.chaos.samples import Sample, Sampler, draw, trend, write
from tests.chaos.tables import percentile, table
from tests.chaos.traffic import Outcome, Verdict
from tests.damage import heed_permissions

_SHOWN = 10
# Connections that stand still are cut within seconds, so that this happens too.
LIMITS = ("--header-seconds", "3", "--transfer-seconds", "3", "--min-bytes-per-second", "1000")
_OPTIONS = ("--cache-mb", "1", "--log-level", "warning", *LIMITS)


@dataclass(frozen=True, slots=True)
class Report:
    records: Sequence[Record]
    verdicts: Sequence[Verdict]
    faults: Sequence[Fault]
    samples: Sequence[Sample]
    disk: str
    log: str
    started: float
    held: Mapping[str, int]

    def count(self, outcome: Outcome) -> int:
        own = sum(verdict.outcome is outcome for verdict in self.verdicts)
        return own + sum(record.outcome == outcome.value for record in self.records)

    @property
    def is_good(self) -> bool:
        return not self.count(Outcome.LOST) and not self.count(Outcome.WRONG) and not self.held

    def recoveries(self) -> dict[str, list[float | None]]:
        """For each kind of fault, the seconds from the end of each to the first right answer to a request
        that was sent after it; None where there was none."""
        right = sorted((record.sent, record.done) for record in self.records if record.outcome == "right")
        sent = [moment for moment, _ in right]
        # The first answer to any request from this one on.
        first = list(itertools.accumulate((done for _, done in reversed(right)), min))[::-1]
        found: dict[str, list[float | None]] = {}
        for fault in self.faults:
            index = bisect.bisect_left(sent, fault.over)
            seconds = first[index] - fault.over if index < len(first) else None
            found.setdefault(fault.kind, []).append(seconds)
        return found

    def lines(self) -> str:
        sent = len(self.records) + len(self.verdicts)
        counts = [("sent", sent), *((outcome.value, self.count(outcome)) for outcome in Outcome)]
        kinds = Counter(record.kind for record in self.records)
        rows: list[Sequence[object]] = [("fault", "times", "it lasted s", "median s", "longest s")]
        for kind, seconds in sorted(self.recoveries().items()):
            known = [one for one in seconds if one is not None]
            longest = max(known) if len(known) == len(seconds) else None
            lasted = [fault.over - fault.begun for fault in self.faults if fault.kind == kind]
            rows.append((kind, len(seconds), percentile(lasted, 0.5), percentile(known, 0.5), longest))
        statuses = Counter(record.status for record in self.records if record.outcome == "refused")
        parts = [
            table(counts),
            "refused with: " + ", ".join(f"{status} {count:,}" for status, count in statuses.most_common()),
            "requests by kind: " + ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common()),
            f"from the end of a fault to the next right answer (the disk is {self.disk}):\n{table(rows)}",
            self._memory(),
            f"the engine holds afterwards: {dict(self.held) or 'nothing'}",
            *self._offenders(),
        ]
        return "\n\n".join(parts)

    def _memory(self) -> str:
        if not self.samples:
            return "no samples"
        first, last = self.samples[0], self.samples[-1]
        rows: list[Sequence[object]] = [
            ("of the server", "at first", "at last", "an hour, in the second half")
        ]
        for label, name in (
            ("resident memory, MiB", "resident_mb"),
            ("allocated in C, MiB", "malloc_mb"),
            ("Python's small objects", "python_blocks"),
        ):
            found = trend(self.samples, name)
            shown = "not known" if found is None else f"{found[0]:+,.1f} ± {found[1]:,.1f}"
            rows.append((label, getattr(first, name), getattr(last, name), shown))
        rows += [(name, getattr(first, name), getattr(last, name), "") for name in ("descriptors", "tasks")]
        return table(rows)

    def _offenders(self) -> list[str]:
        bad = {Outcome.LOST.value, Outcome.WRONG.value}
        reasons = [(record.kind, record.reason) for record in self.records if record.outcome in bad]
        reasons += [("of a fault", one.reason) for one in self.verdicts if one.outcome.value in bad]
        return [f"{kind}: {reason}" for kind, reason in reasons[:_SHOWN]]


async def disturb(
    model: str, pool: Pool, seconds: float, *, seed: int = 0, processes: int = 3, pause: float = 2.0
) -> Report:
    """Runs a server and disturbs it for that long."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        saved = pool.save(folder / "pool")
        with disk_that_can_be_full(folder) as disk:
            options = (*_OPTIONS, "--cache-dir", str(disk.folder), "--cache-disk-mb", "12")
            with running(model, *options, before=heed_permissions) as server:
                async with crowd(server.url, saved, processes, "--abandoned", "0.03") as clients:
                    sampler = Sampler(server, clients.records, 1.0)
                    sampling = asyncio.create_task(sampler.run())
                    started = asyncio.get_running_loop().time()
                    disturber = Disturber(server, clients, pool, disk, random.Random(seed))
                    while not clients.records:  # their processes are starting
                        await asyncio.sleep(0.05)
                    await disturber.run(seconds, pause)
                    await asyncio.sleep(pause)  # for what comes after the last fault
                    sampling.cancel()
                    with suppress(asyncio.CancelledError):
                        await sampling
                held = server.settled(lambda state: not state.held).held
                ended = server.terminate()
                verdicts = [*disturber.verdicts, *_end(server, ended)]
                return Report(
                    records=clients.judged(),
                    verdicts=verdicts,
                    faults=disturber.faults,
                    samples=sampler.samples,
                    disk=disk.how,
                    log=server.log,
                    started=started,
                    held=held,
                )


def _end(server: Running, status: int) -> list[Verdict]:
    if status == 0:
        return []
    return [Verdict(Outcome.WRONG, f"the server ended with {status}:\n{server.log[-2000:]}")]


def run(options: Options) -> int:
    model = options.checkpoint()
    with running(model, "--cache-mb", "64", hooked=False) as undisturbed:
        pool = Pool.ask(Texts.draw(options.seed), undisturbed.url)
    seconds = options.seconds or 60
    report = asyncio.run(disturb(model, pool, seconds, seed=options.seed))
    print(report.lines())
    if options.samples is not None:
        write(report.samples, options.samples)
    if options.log is not None:
        options.log.write_text(report.log, encoding="utf-8")
    if options.plot is not None:
        moments = [fault.begun - report.started for fault in report.faults]
        print(draw(report.samples, moments, options.plot))
    return 0 if report.is_good else 1
