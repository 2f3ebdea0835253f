"""A fleet of engines that are not there: requests are planned by the code of `scheduler/fleet`, and served by
queues with a cache each.

A request has documents drawn from a collection, some far more often than others. Times are a model's: what is
compared is one fleet with another."""

import heapq
import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from maxsimd.scheduler.fleet import (
    Documents,
    Loads,
    Member,
    Part,
    Seen,
    Split,
    cell_of,
    cells_of,
    plan,
    ranked,
)


@dataclass(frozen=True, slots=True)
class FleetShape:
    """What is simulated: `documents` a request of a `collection` whose n-th document is asked for in
    proportion to n**-`zipf`; members that cache `cache` documents each and work a share `busy` of the
    time."""

    members: int
    cell_size: int = 8
    fronts: int = 4
    documents: int = 100
    cache: int = 1_000
    collection: int = 12_000
    zipf: float = 1.0
    busy: float = 0.6
    by_owner: bool = True
    seed: int = 0


# An engine's times, in seconds: each part, each token that is encoded, each document that is compared; and
# the way to a member or back.
_PART, _TOKEN, _ROW, _HOP = 2e-3, 1 / 40_000, 1e-5, 1e-3
# What one step of an engine takes, and what a document has on average, in tokens.
_STEP_TOKENS, _MEAN_TOKENS = 2_048, 180


@dataclass(slots=True)
class _Engine:
    free: float = 0.0
    worked: float = 0.0
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class _Front:
    loads: Loads
    seen: Seen


class _Fleet:
    def __init__(self, shape: FleetShape) -> None:
        self._shape = shape
        self._members = tuple(Member(slot, f"m{slot}", "f") for slot in range(shape.members))
        self._cells = cells_of(self._members, shape.cell_size)
        self._engines = [_Engine() for _ in self._members]
        capacity = shape.cache * shape.members
        self._fronts = [_Front(Loads(), Seen(capacity)) for _ in range(shape.fronts)]
        self._random = random.Random(shape.seed)
        self._generator = generator = np.random.default_rng(shape.seed)
        self._digests = generator.integers(0, 2**64, shape.collection, dtype=np.uint64)
        lengths = generator.lognormal(0.0, 0.6, shape.collection)
        self._tokens = np.maximum(1, lengths / lengths.mean() * _MEAN_TOKENS).astype(np.int64)
        shares = np.arange(1, shape.collection + 1) ** -shape.zipf
        self._bounds = np.cumsum(shares / shares.sum())
        self._replies: list[tuple[float, int, int, Member, int]] = []
        self._now = 0.0
        self._numbered = 0

    def run(self, requests: int, mean_gap: float) -> dict[str, float]:
        """Requests that come at random, `mean_gap` seconds apart on average."""
        begun, latencies, parts, hits = self._now, [], 0, 0
        worked = [engine.worked for engine in self._engines]
        for _ in range(requests):
            self._now += self._random.expovariate(1 / mean_gap)
            self._take_replies()
            ended, num_parts, num_hits = self._request()
            latencies.append(ended - self._now)
            parts += num_parts
            hits += num_hits
        seconds = self._now - begun
        work = np.array([engine.worked for engine in self._engines]) - worked
        return {
            "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
            "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
            "max_over_mean_load": float(work.max() / work.mean()),
            "busy": float(work.mean() / seconds),
            "hits": hits / (requests * self._shape.documents),
            "parts_a_request": parts / requests,
            "seconds_of_work_a_request": float(work.sum() / requests),
        }

    def _request(self) -> tuple[float, int, int]:
        """When the last part of a request is answered, how many parts, and how many documents are hits."""
        number = self._random.randrange(len(self._fronts))
        front = self._fronts[number]
        cell = cell_of(
            self._cells, None, lambda each: front.loads.of(each.members).mean(), self._random.getrandbits(64)
        )
        drawn = np.searchsorted(self._bounds, self._generator.random(self._shape.documents))
        digests = self._digests[drawn]
        tokens = self._tokens[drawn]
        weights = front.seen.weights(cell, digests, tokens)
        split = Split.BY_OWNER if self._shape.by_owner else Split.BY_TOKENS
        loads = front.loads.of(cell.members)
        parts = plan(Documents(digests, tokens, weights), cell.members, loads, split, _STEP_TOKENS)
        ended, hits = 0.0, 0
        for part in parts:
            member = part.members[0]
            num_cached = self._serve(self._engines[member.slot], part, drawn)
            front.loads.sent(member, part.weight)
            front.seen.remember(cell, digests[part.indices].tolist(), member)
            reply = self._engines[member.slot].free + _HOP
            self._numbered += 1
            heapq.heappush(self._replies, (reply, self._numbered, number, member, part.weight))
            ended, hits = max(ended, reply), hits + num_cached
        return ended, len(parts), hits

    def _serve(self, engine: _Engine, part: Part, drawn: np.ndarray) -> int:
        """A part at the end of an engine's queue: how many of its documents are cached there."""
        hits, encoded = 0, 0
        for document in dict.fromkeys(drawn[part.indices].tolist()):
            if document in engine.cached:
                hits += 1
                engine.cached.move_to_end(document)
            else:
                encoded += int(self._tokens[document])
                engine.cached[document] = None
        while len(engine.cached) > self._shape.cache:
            engine.cached.popitem(last=False)
        seconds = _PART + encoded * _TOKEN + len(part.indices) * _ROW
        engine.free = max(engine.free, self._now + _HOP) + seconds
        engine.worked += seconds
        # A document that occurs again in a request is encoded once.
        return hits + len(part.indices) - len(set(drawn[part.indices].tolist()))

    def _take_replies(self) -> None:
        while self._replies and self._replies[0][0] <= self._now:
            at, _, number, member, tokens = heapq.heappop(self._replies)
            queued = int(max(0.0, self._engines[member.slot].free - at) / _TOKEN)
            self._fronts[number].loads.answered(member, tokens, queued)


def simulate(shape: FleetShape, requests: int) -> dict[str, float]:
    """Figures of `requests` requests, after others that have filled the caches."""
    fleet = _Fleet(shape)
    uncached = shape.documents * _MEAN_TOKENS * _TOKEN / shape.members
    fleet.run(requests, uncached / shape.busy)
    warm = fleet.run(requests // 4, uncached / shape.busy)
    gap = warm["seconds_of_work_a_request"] / shape.members / shape.busy
    return {name: round(value, 4) for name, value in fleet.run(requests, gap).items()}


def moved_by_one_more(members: int, documents: int = 20_000) -> float:
    """The share of documents with another owner once there is one member more, times the members there are
    then: 1 where no more move than must."""
    digests = np.random.default_rng(0).integers(0, 2**64, documents, dtype=np.uint64)
    before, after = (ranked(digests, range(count))[:, 0] for count in (members, members + 1))
    return float((before != after).mean() * (members + 1))
