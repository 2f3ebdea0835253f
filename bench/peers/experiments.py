"""What is measured: in each round every system has its turn, and ratios are taken round by round."""

import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from maxsimd.bench.datasets import Request, docstring_requests, paired_request
from maxsimd.bench.load import Send, drive
from maxsimd.bench.peers.systems import System

# Before each turn: threads of the system before spin for a while when there is nothing left to compute.
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Turn:
    """What one system did in one round."""

    documents_per_s: float
    tokens_per_s: float
    median_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """All turns of an experiment at one setting, by system."""

    documents: int
    concurrency: int
    turns: dict[str, list[Turn]]

    def median(self, system: str, what: str) -> float:
        return float(statistics.median(getattr(turn, what) for turn in self.turns[system]))

    def ratio(self, system: str, other: str, what: str) -> float:
        """How often as much of `what` `system` has as `other`: the median over rounds."""
        pairs = zip(self.turns[system], self.turns[other], strict=True)
        return float(statistics.median(getattr(ours, what) / getattr(theirs, what) for ours, theirs in pairs))


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` of `documents` each, `concurrency` at a time; `paired` documents have a query each."""

    requests: int
    documents: int
    concurrency: int
    paired: bool = False

    def make(self, seed: int) -> list[Request]:
        if self.paired:
            return [paired_request(self.documents, seed + i) for i in range(self.requests)]
        return docstring_requests(self.requests, self.documents, seed)


class Contest:
    """Systems that stand ready with one checkpoint, and the rounds that they run."""

    def __init__(self, senders: dict[str, Send]) -> None:
        self._senders = senders

    async def run(self, load: Load, rounds: int, among: frozenset[str] | None = None) -> Outcome:
        """The first round warms up and is not counted; each round has requests of its own, and the order of
        systems turns round, so that none always comes after the same one."""
        names = [name for name in self._senders if among is None or name in among]
        turns: dict[str, list[Turn]] = {name: [] for name in names}
        for number in range(rounds + 1):
            requests = load.make(seed=number)
            for name in names if number % 2 else names[::-1]:
                await asyncio.sleep(_PAUSE_SECONDS)
                turn = await _turn(self._senders[name], requests, load.concurrency)
                if number:
                    turns[name].append(turn)
        return Outcome(load.documents, load.concurrency, turns)


class Arena:
    """Starts systems with a checkpoint and stops them again."""

    def __init__(self, systems: list[System]) -> None:
        self._systems = {system.name: system for system in systems}
        self._stack = AsyncExitStack()

    async def enter(self, checkpoint: str) -> Contest:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="maxsimd-bench-")))
        senders = {}
        for name, system in self._systems.items():
            click.echo(f"  starting {name}", err=True)
            log = folder / f"{name.replace(' ', '-')}.log"
            senders[name] = await self._stack.enter_async_context(system.serve(checkpoint, log))
        return Contest(senders)

    async def close(self) -> None:
        await self._stack.aclose()


async def _turn(send: Send, requests: list[Request], concurrency: int) -> Turn:
    duration, outcomes = await drive(send, requests, concurrency, None, 0)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")
    p50, p99 = np.percentile([outcome.seconds * 1e3 for outcome in outcomes], (50, 99))
    return Turn(
        sum(outcome.documents for outcome in outcomes) / duration,
        sum(outcome.tokens for outcome in outcomes) / duration,
        float(p50),
        float(p99),
    )
