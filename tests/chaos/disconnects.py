"""Clients that leave at random moments: the server is afterwards as it was before."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.leaving import leave_often
from tests.chaos.options import Options
from tests.chaos.pool import Pool, Texts
from tests.chaos.running import Running, State, running
from tests.chaos.tables import table
from tests.chaos.traffic import rerank

_AT_A_TIME = 50
# Threads, their memory and the allocator's are there after this many.
_WARM_UP = 0.2
_MOST_GROWTH = 0.02
# For connections, which end a little later, and for memory that is given back.
_REST = 2.0


@dataclass(frozen=True, slots=True)
class Report:
    moments: Counter[str]
    before: State
    after: State
    resident: tuple[int, int]

    @property
    def is_restored(self) -> bool:
        return self.before == self.after

    @property
    def growth(self) -> float:
        """Of memory, as a share."""
        before, after = self.resident
        return after / before - 1

    def lines(self) -> str:
        rows: list[Sequence[object]] = [
            ("clients that left", self.moments.total()),
            *sorted(self.moments.items()),
        ]
        seen: list[Sequence[object]] = [
            ("", "before", "after"),
            ("descriptors", self.before.descriptors, self.after.descriptors),
            ("tasks", self.before.tasks, self.after.tasks),
            ("engine holds", self.before.held or "nothing", self.after.held or "nothing"),
            ("memory, MiB", *(nbytes / (1 << 20) for nbytes in self.resident)),
        ]
        return f"{table(rows)}\n\n{table(seen)}\nmemory grew by {100 * self.growth:.2f} %"


async def disconnect(server: Running, pool: Pool, count: int, seed: int = 0) -> Report:
    """That many clients come and leave, and as many as warm the server up before."""

    def request(draw: random.Random) -> tuple[str, bytes]:
        ask = rerank(pool, draw, draw.randint(1, 100), options={"cache": draw.choice(["use", "bypass"])})
        return ask.path, ask.body

    await leave_often(server.port, int(_WARM_UP * count), _AT_A_TIME, request, seed + 1)
    server.settled(lambda state: not state.held)
    await asyncio.sleep(_REST)
    before = server.state()
    resident = server.resident_bytes
    moments = await leave_often(server.port, count, _AT_A_TIME, request, seed)
    after = server.settled(lambda state: state == before)
    await asyncio.sleep(_REST)
    return Report(moments, before, after, (resident, server.resident_bytes))


def run(options: Options) -> int:
    with running(options.checkpoint(), "--log-level", "warning") as server:
        pool = Pool.ask(Texts.draw(options.seed), server.url)
        report = asyncio.run(disconnect(server, pool, options.requests or 10_000, options.seed))
    print(report.lines())
    return 0 if report.is_restored and report.growth <= _MOST_GROWTH else 1
