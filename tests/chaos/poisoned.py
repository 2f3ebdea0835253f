"""Sequences of which some break the model: exactly these fail, and all others score as they do without
them."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from tests.chaos.client import send
from tests.chaos.options import Options
from tests.chaos.pool import Pool, Texts
from tests.chaos.running import Running, running
from tests.chaos.tables import table
from tests.chaos.traffic import Outcome, Verdict, rerank

DOCUMENTS = 100
_AT_A_TIME = 4
_REPORTED = {"on_error": "report", "cache": "bypass"}


@dataclass(frozen=True, slots=True)
class Report:
    """Of `sequences`, `poisoned` were to fail. `failing_passes` are those until a lone poisoned document
    was isolated among others: the first time that it came, and again. `held` is what the engine held in the
    end."""

    sequences: int
    poisoned: int
    verdicts: Sequence[Verdict]
    failing_passes: tuple[int, int]
    held: Mapping[str, int]

    @property
    def is_good(self) -> bool:
        return not self.held and all(
            verdict.outcome in (Outcome.RIGHT, Outcome.FAILED) for verdict in self.verdicts
        )

    def lines(self) -> str:
        counts = Counter(verdict.outcome for verdict in self.verdicts)
        rows: list[Sequence[object]] = [
            ("sequences", self.sequences),
            ("of these poisoned", self.poisoned),
            ("requests", len(self.verdicts)),
            ("right, without poison", counts[Outcome.RIGHT]),
            ("right, with exactly the poisoned failed", counts[Outcome.FAILED]),
            ("anything else", len(self.verdicts) - counts[Outcome.RIGHT] - counts[Outcome.FAILED]),
            ("failing passes to isolate one of 100", self.failing_passes[0]),
            ("the same one again", self.failing_passes[1]),
            ("engine holds afterwards", self.held or "nothing"),
        ]
        reasons = [one.reason for one in self.verdicts if one.reason]
        return "\n".join([table(rows), *reasons[:10]])


async def poison(server: Running, pool: Pool, sequences: int, poisoned: int, seed: int = 0) -> Report:
    """Sends that many sequences, the poisoned ones at random places among them."""
    draw = random.Random(seed)
    requests = -(-sequences // DOCUMENTS)
    number = Counter(position // DOCUMENTS for position in draw.sample(range(sequences), poisoned))
    asks = (rerank(pool, draw, DOCUMENTS, number[i], _REPORTED) for i in range(requests))
    verdicts: list[Verdict] = []

    async with aiohttp.ClientSession(server.url) as session:

        async def client() -> None:
            for ask in asks:
                verdicts.append((await send(session, ask))[1])

        await asyncio.gather(*(client() for _ in range(_AT_A_TIME)))
        lone = rerank(pool, draw, DOCUMENTS, 1, _REPORTED)
        passes = [server.ask("stats")["failed"]]
        for _ in range(2):
            verdicts.append((await send(session, lone))[1])
            passes.append(server.ask("stats")["failed"])
    first, again = (after - before for before, after in itertools.pairwise(passes))
    held = server.settled(lambda state: not state.held).held
    return Report(requests * DOCUMENTS, poisoned, verdicts, (first, again), held)


def run(options: Options) -> int:
    """`--requests` counts requests of 100; one sequence in a hundred is poisoned."""
    sequences = DOCUMENTS * (options.requests or 1000)
    with running(options.checkpoint(), "--cache-mb", "64", "--log-level", "error") as server:
        pool = Pool.ask(Texts.draw(options.seed), server.url)
        report = asyncio.run(poison(server, pool, sequences, sequences // 100, options.seed))
    print(report.lines())
    return 0 if report.is_good else 1
