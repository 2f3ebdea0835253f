"""Sequences of which some break the model: exactly these fail, and the others score as usual."""

import asyncio
import random
from argparse import Namespace
from collections import Counter

import aiohttp

from tests.chaos.findings import Found
from tests.chaos.running import Running, running
from tests.chaos.traffic import Outcome, Pool, Texts, Verdict, rerank, send

_DOCUMENTS = 100
_AT_A_TIME = 4
_REPORTED = {"on_error": "report", "cache": "bypass"}


async def poison(server: Running, pool: Pool, sequences: int, poisoned: int, seed: int = 0) -> Found:
    draw = random.Random(seed)
    number = Counter(position // _DOCUMENTS for position in draw.sample(range(sequences), poisoned))
    requests = -(-sequences // _DOCUMENTS)
    asks = (rerank(pool, draw, _DOCUMENTS, number[i], _REPORTED) for i in range(requests))
    verdicts: list[Verdict] = []

    async with aiohttp.ClientSession(server.url) as session:

        async def client() -> None:
            for ask in asks:
                verdicts.append((await send(session, ask))[1])

        await asyncio.gather(*(client() for _ in range(_AT_A_TIME)))
        lone = rerank(pool, draw, _DOCUMENTS, 1, _REPORTED)
        before = server.ask("failed")
        verdicts.append((await send(session, lone))[1])
    passes = server.ask("failed") - before
    held = server.settled().held
    counts = Counter(verdict.outcome for verdict in verdicts)
    rows = [
        ("sequences", sequences), ("of these poisoned", poisoned), ("requests", len(verdicts)),
        ("right, without poison", counts[Outcome.RIGHT]),
        ("right, with exactly the poisoned failed", counts[Outcome.FAILED]),
        ("failing passes to isolate one of 100", passes), ("engine holds afterwards", held or "nothing"),
    ]  # fmt: skip
    good = (Outcome.RIGHT, Outcome.FAILED)
    broken = [f"{one.outcome}: {one.reason}" for one in verdicts if one.outcome not in good]
    if counts[Outcome.FAILED] != len(number) + 1:
        broken.append(f"{counts[Outcome.FAILED]} requests had failures, of {len(number) + 1} with poison")
    return Found([rows], [*broken, *(f"the engine holds {each}" for each in held)])


def run(options: Namespace) -> Found:
    """`--requests` counts requests of 100; one sequence in a hundred is poisoned."""
    sequences = _DOCUMENTS * (options.requests or 1000)
    with running(options.model, "--cache-mb", "64", "--log-level", "error") as server:
        pool = Pool.ask(Texts.draw(options.seed), server.url)
        return asyncio.run(poison(server, pool, sequences, sequences // 100, options.seed))
