"""`maxsimd bench fleet`: fleets of simulated engines. The code of `scheduler/fleet` plans requests and
retries them; queues with a cache serve them. Times are a model's: they compare one fleet with another."""

import heapq
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler import fleet as fleets

# The seconds of a part, of each token that is encoded, and of each document that is compared: a small model
# on a few cores. `maxsimd bench fleet-overhead` measures 4 ms for a request with one cached document, and 27
# us for each more, with HTTP.
_PART, _TOKEN, _ROW = 2e-3, 1 / 40_000, 1e-5
# Seconds to a member or back.
_HOP = 1e-3
# Tokens of an engine's step, and of a document on average.
_STEP_TOKENS, _MEAN_TOKENS = 2_048, 180
# The parts that a front may retry, as in `api/fleet/spread.py`.
_SPARE_TRIES = 1_000.0
# Requests that count at least, however few engines there are; engines to which a fleet grows one by one.
LEAST_REQUESTS, GROWN = 2_000, 100
# Documents whose moves count; requests that are drawn for each cell, and at least.
_MOVED_DOCUMENTS, _DRAWN_A_CELL, _DRAWN = 4_000, 40, 1_000


@dataclass(slots=True)
class SimulatedEngine:
    """One member's engine, which serves one part after another. Its cache has room for `capacity` documents,
    least recently used evicted first. All takes `slowness` times as long."""

    member: fleets.Member
    capacity: int
    slowness: float = 1.0
    worked: float = 0.0
    _free_at: float = 0.0
    _cached: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def serve(self, at: float, documents: Iterable[tuple[int, int]]) -> tuple[float, int]:
        """Serves a part that comes `at` a time, of documents by number and tokens. Returns when it is done,
        and its cached or repeated documents."""
        hits = encoded = count = 0
        for document, tokens in documents:
            count += 1
            if document in self._cached:
                hits += 1
                self._cached.move_to_end(document)
            else:
                encoded += tokens
                self._cached[document] = tokens
        while len(self._cached) > self.capacity:
            self._cached.popitem(last=False)
        seconds = (_PART + encoded * _TOKEN + count * _ROW) * self.slowness
        self._free_at = max(self._free_at, at) + seconds
        self.worked += seconds
        return self._free_at, hits

    def queued_tokens(self, at: float) -> int:
        """The tokens in the queue, which a reply reports without knowing `slowness`."""
        return int(max(0.0, self._free_at - at) / (_TOKEN * self.slowness))


class Routing(Enum):
    """`BY_OWNER`: documents go to their owners in a cell; `ANYWHERE`: to its least busy engines, in as few
    parts as steps. Else a request goes whole to the `LIGHTER_OF_TWO` drawn engines, or to a `RANDOM` one."""

    BY_OWNER = "by owner"
    ANYWHERE = "anywhere"
    LIGHTER_OF_TWO = "lighter of two"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class FleetShape:
    """A fleet and its requests: `documents` of a `collection`, by Zipf's law. Members cache `cache` documents
    each, and work a share `busy` of the time. The first may be `slowness` times as slow; with `dies` it dies
    after a quarter of the requests, and one with an empty cache replaces it after half."""

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


class _Front(fleets.Planner):
    """A front, whose requests go to lighter cells or to any."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.budget = fleets.RetryBudget(spare=_SPARE_TRIES)
        self._routing = routing

    def load(self, cell: fleets.Cell) -> float:
        return 0.0 if self._routing is Routing.RANDOM else super().load(cell)


@dataclass(slots=True)
class _Request:
    """A request under way, with the numbers of its documents [N]."""

    front: _Front
    reach: fleets.Reach
    drawn: NDArray[np.intp]
    attempts: fleets.Attempts
    begun: float


class _Fleet:
    """The clock, the events and the members."""

    def __init__(self, shape: FleetShape) -> None:
        self._shape = shape
        members = [fleets.Member(slot, f"m{slot}", "f") for slot in range(shape.members)]
        self._engines = {member.name: SimulatedEngine(member, shape.cache) for member in members}
        self._fronts = [_Front(shape.routing) for _ in range(shape.fronts)]
        self._random = random.Random(shape.seed)
        self._generator = generator = np.random.default_rng(shape.seed)
        self._digests = generator.integers(0, 2**64, shape.collection, dtype=np.uint64)
        lengths = generator.lognormal(0.0, 0.6, shape.collection)
        self._tokens = np.maximum(1, lengths / lengths.mean() * _MEAN_TOKENS).astype(np.int64)
        shares = np.arange(1, shape.collection + 1) ** -shape.zipf
        self._bounds = np.cumsum(shares / shares.sum())
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._under_way: dict[int, tuple[_Request, fleets.Send]] = {}
        self._numbers = itertools.count()
        self.now = 0.0  # seconds since the fleet's beginning
        self._latencies, self._counts = list[float](), Counter[str]()
        self._arrange(members)

    def run(self, requests: int, mean_gap: float) -> dict[str, float]:
        """Requests that come at random, `mean_gap` seconds apart on average, until all are answered."""
        begun, self._latencies, self._counts = self.now, [], Counter()
        worked = {name: engine.worked for name, engine in self._engines.items()}
        for _ in range(requests):
            self._until(self.now + self._random.expovariate(1 / mean_gap))
            self._begin()
        seconds = self.now - begun
        self._until(None)
        work = np.array([engine.worked - worked.get(name, 0.0) for name, engine in self._engines.items()])
        counts = self._counts
        return {
            "p50_ms": float(np.percentile(self._latencies, 50)) * 1e3,
            "p99_ms": float(np.percentile(self._latencies, 99)) * 1e3,
            "max_over_mean_load": float(work.max() / work.mean()),
            "busy": float(work.sum() / len(self._members) / seconds),
            "hits": counts["hits"] / counts["answered"],
            "parts_a_request": counts["parts"] / requests,
            "requests_per_s_an_engine": requests / seconds / len(self._members),
            "seconds_of_work_a_request": float(work.sum() / requests),
            "tried_again": counts["tried_again"],
            "failed": counts["failed"],
        }

    def slow_down(self, slowness: float) -> None:
        """From now on the first member takes longer."""
        next(iter(self._engines.values())).slowness = slowness

    def schedule_death(self, at: float, replaced_at: float) -> None:
        """The first member dies, and another one takes its slot."""
        self._at(at, self._kill)
        newer = fleets.Member(0, "newer", "f")
        self._engines[newer.name] = SimulatedEngine(newer, self._shape.cache)
        self._at(replaced_at, lambda: self._arrange([newer, *self._members]))

    def _arrange(self, members: Sequence[fleets.Member]) -> None:
        shape = self._shape
        is_whole = shape.routing in (Routing.LIGHTER_OF_TWO, Routing.RANDOM)
        self._members = tuple(members)
        self._cells = fleets.cells_of(self._members, 1 if is_whole else shape.cell_size)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _until(self, when: float | None) -> None:
        """Runs the events up to a time, or all."""
        while self._events and (when is None or self._events[0][0] <= when):
            self.now, _, event = heapq.heappop(self._events)
            event()
        if when is not None:
            self.now = when

    def _begin(self) -> None:
        """A request arrives, and is planned."""
        front = self._random.choice(self._fronts)
        draw = self._random.getrandbits(64)
        drawn = np.searchsorted(self._bounds, self._generator.random(self._shape.documents))
        digests, tokens = self._digests[drawn], self._tokens[drawn]
        split = fleets.Split.BY_OWNER if self._shape.routing is Routing.BY_OWNER else fleets.Split.BY_TOKENS
        reach, parts = front.plan(self._cells, digests, tokens, split, _STEP_TOKENS, self.now, draw)
        self._counts["parts"] += len(parts)
        attempts = fleets.Attempts(parts, front.budget)
        request = _Request(front, reach, drawn, attempts, self.now)
        for send in attempts.begin():
            self._send(request, send)

    def _send(self, request: _Request, send: fleets.Send) -> None:
        drawn = request.drawn[send.part.indices]
        documents = zip(drawn.tolist(), self._tokens[drawn].tolist(), strict=True)
        done, hits = self._engines[send.member.name].serve(self.now + _HOP, documents)
        request.front.loads.sent(send.member, send.part.weight)
        number = next(self._numbers)
        self._under_way[number] = request, send
        self._at(done + _HOP, partial(self._answered, number, hits))

    def _answered(self, number: int, hits: int) -> None:
        found = self._under_way.pop(number, None)
        if found is None:
            return  # its member died before
        request, send = found
        queued = self._engines[send.member.name].queued_tokens(self.now)
        request.front.loads.answered(send.member, send.part.weight, queued)
        if not request.attempts.answered(send.attempt):
            return  # its request has failed
        self._counts["hits"] += hits
        self._counts["answered"] += len(send.part.indices)
        digests = self._digests[request.drawn[send.part.indices]]
        request.front.seen.remember(request.reach, digests.tolist(), send.member)
        if request.attempts.is_over:
            self._latencies.append(self.now - request.begun)

    def _kill(self) -> None:
        """Retries elsewhere what waits at the first member."""
        dead = self._members[0]
        self._arrange(self._members[1:])
        lost = [number for number, (_, send) in self._under_way.items() if send.member is dead]
        for number in lost:
            request, send = self._under_way.pop(number)
            request.front.loads.answered(send.member, send.part.weight, None)
            request.front.loads.forget_others(self._members)
            try:
                sends = request.attempts.lost(send.attempt, self._members)
            except fleets.FleetError:
                self._counts["failed"] += 1
                continue
            self._counts["tried_again"] += len(sends)
            for again in sends:
                self._send(request, again)


def simulate(shape: FleetShape, requests: int) -> dict[str, float]:
    """Figures of `requests` requests, after twice as many that fill the caches."""
    fleet = _Fleet(shape)
    uncached = shape.documents * _MEAN_TOKENS * _TOKEN / shape.members
    fleet.run(2 * requests, uncached / shape.busy)
    warm = fleet.run(requests // 4, uncached / shape.busy)
    gap = warm["seconds_of_work_a_request"] / shape.members / shape.busy
    fleet.slow_down(shape.slowness)
    if shape.dies:
        fleet.schedule_death(fleet.now + requests / 4 * gap, fleet.now + requests / 2 * gap)
    return {name: round(value, 4) for name, value in fleet.run(requests, gap).items()}


def compare_fleets(shape: FleetShape, members: Sequence[int], requests: int) -> list[dict[str, Any]]:
    """Fleets of so many members, by owner and anywhere, printed as they come."""
    rows = []
    for count in members:
        for routing in (Routing.BY_OWNER, Routing.ANYWHERE):
            fleet = replace(shape, members=count, routing=routing)
            row = _measured(f"{count:,} engines, {routing.value}", fleet, requests)
            rows.append({"members": count, "documents": routing.value, **row})
    return rows


def sweep(requests_an_engine: int) -> list[dict[str, Any]]:
    """Fleets of 100 engines that differ in one thing, and small fleets, printed as they come."""
    return [{"what": name, **_measured(name, shape, requests_an_engine)} for name, shape in _shapes()]


def _measured(name: str, shape: FleetShape, requests_an_engine: int) -> dict[str, float]:
    figures = simulate(shape, max(LEAST_REQUESTS, requests_an_engine * shape.members))
    line = (
        f"  {name:<36} p50 {figures['p50_ms']:6.1f} ms, p99 {figures['p99_ms']:7.1f} ms, "
        f"hits {figures['hits']:.3f}, load max / mean {figures['max_over_mean_load']:.2f}, "
        f"{figures['parts_a_request']:5.1f} parts a request, "
        f"{figures['requests_per_s_an_engine']:5.2f} requests/s an engine"
    )
    again, failed = figures["tried_again"], figures["failed"]
    more = f", {again:.0f} parts tried again, {failed:.0f} requests failed" if again + failed else ""
    click.echo(line + more)
    return figures


def _shapes() -> Iterator[tuple[str, FleetShape]]:
    yield "100 engines", FleetShape(100)
    for routing in (Routing.ANYWHERE, Routing.LIGHTER_OF_TWO, Routing.RANDOM):
        yield f"documents {routing.value}", FleetShape(100, routing=routing)
    for fronts in (1, 16):
        yield f"fronts: {fronts}", FleetShape(100, fronts=fronts)
    for size in (1, 4, 16):
        yield f"cells of {size}", FleetShape(100, cell_size=size)
    yield "one cell", FleetShape(100, cell_size=100)
    for zipf in (0.8, 1.2):
        yield f"Zipf {zipf}", FleetShape(100, zipf=zipf)
        yield f"Zipf {zipf}, anywhere", FleetShape(100, zipf=zipf, routing=Routing.ANYWHERE)
    yield "one engine 5 times as slow", FleetShape(100, slowness=5.0)
    yield "one engine dies and is replaced", FleetShape(100, dies=True)
    for members in (8, 9, 12, 16):
        yield f"{members} engines", FleetShape(members)


def compare_moves(members: Sequence[int], cell_size: int) -> dict[str, dict[str, float]]:
    """By the size of a fleet and a change, printed as they come: the share of all requests' documents that
    move, times the larger number of members. It is 1 if as many move as the one that comes or goes has on
    average."""
    moves: dict[str, dict[str, float]] = {}
    for count in members:
        before, newer = _fleet(count), fleets.Member(0, "newer", "f")
        changes = {"one more comes": _fleet(count + 1)}
        changes |= {"one dies, another takes its slot": (newer, *before[1:])}
        if count > 1:
            changes |= {"the last goes": before[:-1], "the first goes, its slot stays free": before[1:]}
        for change, after in changes.items():
            times = round(moved(before, after, cell_size) * max(len(before), len(after)), 3)
            moves.setdefault(str(count), {})[change] = times
            shown = f"{count:>5,} engines, {change + ':':<40}"
            click.echo(f"  {shown} {times:.2f} / engines of the documents move")
    return moves


def moves_of_growth(members: int, cell_size: int) -> list[float]:
    """The same for each step from one member to two, three, and on to `members`, and prints a summary."""
    fleets = [_fleet(count) for count in range(1, members + 1)]
    steps = [
        round(moved(before, after, cell_size) * len(after), 3) for before, after in itertools.pairwise(fleets)
    ]
    mean, most = sum(steps) / len(steps), max(steps)
    shown = f"{mean:.2f} / engines a step, at most {most:.2f}"
    click.echo(f"  from 1 engine to {members}, one by one: {shown}")
    return steps


def moved(before: tuple[fleets.Member, ...], after: tuple[fleets.Member, ...], cell_size: int) -> float:
    """The share of documents whose member after the change did not own them before, for any request, and so
    encodes them again. Requests go to the less busy cells, as a front draws them."""
    digests = np.random.default_rng(0).integers(0, 2**64, _MOVED_DOCUMENTS, dtype=np.uint64)
    earlier, later = _Owners(before, cell_size, digests), _Owners(after, cell_size, digests)
    has_moved = {cell.number: ~earlier.has_owned(later.owners[cell.number]) for cell in later.cells}
    draws = random.Random(0)
    shares = []
    for _ in range(max(_DRAWN, _DRAWN_A_CELL * len(later.cells))):
        number, other = later.draw(draws.getrandbits(64))
        is_there = later.is_owned[number]
        shares.append(float(np.where(is_there, has_moved[number], has_moved[other]).mean()))
    return float(np.mean(shares))


class _Owners:
    """Documents [N] and their members: by a cell's number the names of their `owners` there, and whether
    their slot has a member."""

    def __init__(
        self, members: tuple[fleets.Member, ...], cell_size: int, digests: NDArray[np.uint64]
    ) -> None:
        self.cells = fleets.cells_of(members, cell_size)
        self.owners = {
            cell.number: np.array([member.name for member in cell.members])[cell.ranked(digests)[:, 0]]
            for cell in self.cells
        }
        self.is_owned = {cell.number: cell.is_owned(digests) for cell in self.cells}
        self._cell_of = {member.name: cell.number for cell in self.cells for member in cell.members}
        self._work = dict.fromkeys(self._cell_of, 0)

    def has_owned(self, names: NDArray[np.str_]) -> NDArray[np.bool_]:
        """Whether members by name, one for each document [N], own it for some request."""
        owned = np.zeros(len(names), dtype=np.bool_)
        free = {number: ~is_owned for number, is_owned in self.is_owned.items()}
        num_free = np.sum(list(free.values()), axis=0)
        for name in np.unique(names):
            number = self._cell_of.get(str(name))
            if number is not None:
                # Documents whose slot is the member's own, and those without one that come from other cells.
                comes = self.is_owned[number] | (num_free > free[number]) | (len(self.cells) == 1)
                owned |= (names == name) & (self.owners[number] == name) & comes
        return owned

    def draw(self, draw: int) -> tuple[int, int]:
        """The numbers of a request's first cell, and of the cell for documents without a member there. Counts
        the request as work of its members."""
        reach = fleets.reach_of(self.cells, self._load, draw)
        number = reach.cell.number
        other = number if reach.other is None else reach.other.number
        taken = np.where(self.is_owned[number], self.owners[number], self.owners[other])
        for name, count in zip(*np.unique(taken, return_counts=True), strict=True):
            self._work[str(name)] += int(count)
        return number, other

    def _load(self, cell: fleets.Cell) -> float:
        return float(np.mean([self._work[member.name] for member in cell.members]))


def _fleet(members: int) -> tuple[fleets.Member, ...]:
    return tuple(fleets.Member(slot, f"m{slot}", "f") for slot in range(members))
