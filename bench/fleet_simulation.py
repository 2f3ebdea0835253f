"""A fleet of engines that are not there: requests are planned, and tried again, by the code of
`scheduler/fleet`, and served by queues with a cache each.

A request has documents drawn from a collection, some far more often than others. Times are a model's: what is
compared is one fleet with another."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from maxsimd.bench.fleet_engines import TOKEN, SimulatedEngine
from maxsimd.scheduler.fleet import (
    Attempts,
    Cell,
    Documents,
    Fail,
    Loads,
    Member,
    Reach,
    RetryBudget,
    Seen,
    Send,
    Split,
    cells_of,
    plan,
    reach_of,
)

# The way to a member or back, in seconds.
_HOP = 1e-3
# What one step of an engine takes, and what a document has on average, in tokens.
_STEP_TOKENS, _MEAN_TOKENS = 2_048, 180
# What a front remembers having sent, how often it forgets what replies say of queues, in seconds, and how
# many parts it may try again: those of `api/fleet/spread.py`.
_REMEMBERED, _QUEUES_FOR, _SPARE_TRIES = 200_000, 1.0, 1_000.0


class Routing(Enum):
    """Where documents go. `BY_OWNER`: to their owners in a cell. `ANYWHERE`: in a cell to whichever has the
    least to do, as few parts as steps. Else a request goes whole to one engine: `LIGHTER_OF_TWO` that are
    drawn, or a `RANDOM` one."""

    BY_OWNER = "by owner"
    ANYWHERE = "anywhere"
    LIGHTER_OF_TWO = "lighter of two"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class FleetShape:
    """What is simulated: `documents` a request of a `collection` whose n-th document is asked for in
    proportion to n**-`zipf`; members that cache `cache` documents each and work a share `busy` of the
    time. While it counts, the first member may be `slowness` times as slow as the others; with `dies` it is
    gone after a quarter of the requests, and replaced by one with an empty cache after half of them."""

    members: int
    cell_size: int = 8
    fronts: int = 4
    documents: int = 100
    cache: int = 1_000
    collection: int = 12_000
    zipf: float = 1.0
    busy: float = 0.6
    routing: Routing = Routing.BY_OWNER
    slowness: float = 1.0
    dies: bool = False
    seed: int = 0


@dataclass(slots=True)
class _Front:
    loads: Loads = field(default_factory=Loads)
    seen: Seen = field(default_factory=lambda: Seen(_REMEMBERED))
    budget: RetryBudget = field(default_factory=lambda: RetryBudget(spare=_SPARE_TRIES))
    forgot: float = 0.0


@dataclass(slots=True)
class _Request:
    """One that is under way: its documents' numbers [N], digests [N] and tokens [N]."""

    front: _Front
    reach: Reach
    drawn: NDArray[np.intp]
    digests: NDArray[np.uint64]
    tokens: NDArray[np.int64]
    attempts: Attempts
    begun: float


@dataclass(slots=True)
class _Counts:
    latencies: list[float] = field(default_factory=list)
    parts: int = 0
    hits: int = 0
    answered: int = 0
    tried_again: int = 0
    failed: int = 0


class _Fleet:
    """The clock, what happens when, and who is there."""

    def __init__(self, shape: FleetShape) -> None:
        self._shape = shape
        members = [Member(slot, f"m{slot}", "f") for slot in range(shape.members)]
        self._engines = {member.name: SimulatedEngine(member, shape.cache) for member in members}
        self._fronts = [_Front() for _ in range(shape.fronts)]
        self._random = random.Random(shape.seed)
        self._generator = generator = np.random.default_rng(shape.seed)
        self._digests = generator.integers(0, 2**64, shape.collection, dtype=np.uint64)
        lengths = generator.lognormal(0.0, 0.6, shape.collection)
        self._tokens = np.maximum(1, lengths / lengths.mean() * _MEAN_TOKENS).astype(np.int64)
        shares = np.arange(1, shape.collection + 1) ** -shape.zipf
        self._bounds = np.cumsum(shares / shares.sum())
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._under_way: dict[int, tuple[_Request, Send]] = {}
        self._numbered = self._sent = 0
        self._now = 0.0
        self._counts = _Counts()
        self._arrange(members)

    @property
    def now(self) -> float:
        """Seconds since the fleet's beginning."""
        return self._now

    def run(self, requests: int, mean_gap: float) -> dict[str, float]:
        """Requests that come at random, `mean_gap` seconds apart on average, until all are answered."""
        begun, self._counts = self._now, _Counts()
        worked = {name: engine.worked for name, engine in self._engines.items()}
        for _ in range(requests):
            arrival = self._now + self._random.expovariate(1 / mean_gap)
            self._until(arrival)
            self._begin()
        seconds = self._now - begun
        self._until(None)
        work = np.array([engine.worked - worked.get(name, 0.0) for name, engine in self._engines.items()])
        counts = self._counts
        return {
            "p50_ms": float(np.percentile(counts.latencies, 50)) * 1e3,
            "p99_ms": float(np.percentile(counts.latencies, 99)) * 1e3,
            "max_over_mean_load": float(work.max() / work.mean()),
            "busy": float(work.sum() / len(self._members) / seconds),
            "hits": counts.hits / counts.answered,
            "parts_a_request": counts.parts / requests,
            "requests_per_s_an_engine": requests / seconds / len(self._members),
            "seconds_of_work_a_request": float(work.sum() / requests),
            "tried_again": counts.tried_again,
            "failed": counts.failed,
        }

    def slow_down(self, slowness: float) -> None:
        """From now on the first member takes longer."""
        next(iter(self._engines.values())).slowness = slowness

    def schedule_death(self, at: float, replaced_at: float) -> None:
        """The first member dies, and another one takes its slot."""
        self._at(at, self._kill)
        newer = Member(0, "newer", "f")
        self._engines[newer.name] = SimulatedEngine(newer, self._shape.cache)
        self._at(replaced_at, lambda: self._arrange([newer, *self._members]))

    def _arrange(self, members: Sequence[Member]) -> None:
        shape = self._shape
        is_whole = shape.routing in (Routing.LIGHTER_OF_TWO, Routing.RANDOM)
        self._members = tuple(members)
        self._cells = cells_of(self._members, 1 if is_whole else shape.cell_size)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self._numbered += 1
        heapq.heappush(self._events, (when, self._numbered, event))

    def _until(self, when: float | None) -> None:
        """Lets happen what happens before; all of it without a time."""
        while self._events and (when is None or self._events[0][0] <= when):
            self._now, _, event = heapq.heappop(self._events)
            event()
        if when is not None:
            self._now = when

    def _begin(self) -> None:
        """A request arrives, and is planned."""
        front = self._random.choice(self._fronts)
        if self._now > front.forgot + _QUEUES_FOR:
            front.loads.forget_queued()
            front.forgot = self._now
        reach = reach_of(self._cells, partial(self._load, front), self._random.getrandbits(64))
        drawn = np.searchsorted(self._bounds, self._generator.random(self._shape.documents))
        digests, tokens = self._digests[drawn], self._tokens[drawn]
        documents = Documents(digests, tokens, front.seen.weights(reach, digests, tokens))
        split = Split.BY_OWNER if self._shape.routing is Routing.BY_OWNER else Split.BY_TOKENS
        parts = plan(documents, reach, front.loads.of(reach.members), split, _STEP_TOKENS)
        self._counts.parts += len(parts)
        attempts = Attempts(parts, front.budget)
        request = _Request(front, reach, drawn, digests, tokens, attempts, self._now)
        for send in attempts.begin():
            self._send(request, send)

    def _load(self, front: _Front, cell: Cell) -> float:
        if self._shape.routing is Routing.RANDOM:
            return 0.0
        return float(front.loads.of(cell.members).mean())

    def _send(self, request: _Request, send: Send) -> None:
        engine, indices = self._engines[send.member.name], send.part.indices
        documents = zip(request.drawn[indices].tolist(), request.tokens[indices].tolist(), strict=True)
        done, hits = engine.serve(self._now + _HOP, documents)
        request.front.loads.sent(send.member, send.part.weight)
        self._sent += 1
        self._under_way[self._sent] = request, send
        self._at(done + _HOP, partial(self._answered, self._sent, hits))

    def _answered(self, number: int, hits: int) -> None:
        found = self._under_way.pop(number, None)
        if found is None:
            return  # its member died before
        request, send = found
        queued = self._engines[send.member.name].queued_tokens(self._now)
        request.front.loads.answered(send.member, send.part.weight, queued)
        if not request.attempts.answered(send.attempt):
            return  # its request has failed
        self._counts.hits += hits
        self._counts.answered += len(send.part.indices)
        request.front.seen.remember(request.reach, request.digests[send.part.indices].tolist(), send.member)
        if request.attempts.is_over:
            self._counts.latencies.append(self._now - request.begun)

    def _kill(self) -> None:
        """What waits at the first member goes elsewhere."""
        dead = self._members[0]
        self._arrange(self._members[1:])
        lost = [number for number, (_, send) in self._under_way.items() if send.member is dead]
        for number in lost:
            request, send = self._under_way.pop(number)
            request.front.loads.answered(send.member, send.part.weight, None)
            request.front.loads.forget_others(self._members)
            sends = request.attempts.lost(send.attempt, self._members)
            if isinstance(sends, Fail):
                self._counts.failed += 1
                continue
            self._counts.tried_again += len(sends)
            for again in sends:
                self._send(request, again)


def simulate(shape: FleetShape, requests: int) -> dict[str, float]:
    """Figures of `requests` requests, after twice as many that have filled the caches."""
    fleet = _Fleet(shape)
    uncached = shape.documents * _MEAN_TOKENS * TOKEN / shape.members
    fleet.run(2 * requests, uncached / shape.busy)
    warm = fleet.run(requests // 4, uncached / shape.busy)
    gap = warm["seconds_of_work_a_request"] / shape.members / shape.busy
    fleet.slow_down(shape.slowness)
    if shape.dies:
        fleet.schedule_death(fleet.now + requests / 4 * gap, fleet.now + requests / 2 * gap)
    return {name: round(value, 4) for name, value in fleet.run(requests, gap).items()}
