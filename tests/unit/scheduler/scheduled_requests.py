"""Requests for the scheduler's tests, a model of what must be waiting, and the plainest order of work."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from maxsimd.scheduler import (
    CachedBatch,
    DocumentPayload,
    ImageJob,
    PlacedImage,
    ResultSlot,
    Scheduler,
    Sequence,
    Step,
    StepLimits,
    Tokens,
)

WORDS = np.zeros(100_000, dtype=np.int32)


def tokens(length: int) -> Tokens:
    return Tokens(WORDS[:length])


def texts(request_id: int, lengths: list[int], first_id: int = 0) -> list[Sequence]:
    """Sequences that wait for nothing."""
    return [
        Sequence.text(first_id + i, ResultSlot(request_id, i), "embed", tokens(length))
        for i, length in enumerate(lengths)
    ]


def document(request_id: int, sequence_id: int, length: int, query_id: int) -> Sequence:
    slot = ResultSlot(request_id, sequence_id)
    return Sequence.document(sequence_id, slot, "embed", tokens(length), DocumentPayload(query_id))


def query(request_id: int, sequence_id: int, length: int, num_consumers: int = 1) -> Sequence:
    return Sequence.query(sequence_id, request_id, "embed", tokens(length), num_consumers)


def cached(request_id: int, price: int, query_id: int = -1) -> CachedBatch:
    """One cached document; unless a query is given, of one that was scheduled long ago."""
    return CachedBatch(request_id, query_id, price, ("document",))


def two_stage(
    request_id: int, queries: list[int], lengths: list[int], prices: list[int], first_id: int = 0
) -> tuple[list[Sequence], list[CachedBatch]]:
    """Queries of the given lengths, with documents and cached batches that go round them."""
    count = len(queries)
    consumers = [len(lengths[i::count]) + len(prices[i::count]) for i in range(count)]
    sequences = [
        query(request_id, first_id + i, length, max(1, consumers[i])) for i, length in enumerate(queries)
    ]
    for i, length in enumerate(lengths):
        sequences.append(document(request_id, first_id + count + i, length, first_id + i % count))
    return sequences, [cached(request_id, price, first_id + i % count) for i, price in enumerate(prices)]


def pairs(request_id: int, prefix_length: int, lengths: list[int], first_id: int = 0) -> list[Sequence]:
    """A prefix, and pairs with `lengths` tokens of their own behind it."""
    prefix = Sequence.prefix(first_id, request_id, tokens(prefix_length), len(lengths))
    return [prefix] + [
        Sequence.pair(first_id + 1 + i, ResultSlot(request_id, i), tokens(prefix_length + length), prefix)
        for i, length in enumerate(lengths)
    ]


# Price and features of a picture.
Picture = tuple[int, int]


def pages(
    request_id: int, first_id: int, documents: list[list[Picture]], query_length: int, words: int = 3
) -> tuple[list[Sequence], list[ImageJob]]:
    """A query and documents, each with pictures and some words behind them."""
    sequences, images = [query(request_id, first_id, query_length, max(1, len(documents)))], []
    next_id = first_id + 1
    for index, pictures in enumerate(documents):
        slot, placed, length = ResultSlot(request_id, index), [], 0
        for i, (price, features) in enumerate(pictures):
            positions = np.arange(length, length + features)
            placed.append(PlacedImage(next_id, positions, None, b""))
            together = sum(features for _, features in pictures) if i == 0 else 0
            images.append(ImageJob(next_id, request_id, price, together, None, slot))
            next_id, length = next_id + 1, length + features
        tokens = Tokens(WORDS[: length + words], images=tuple(placed))
        sequences.append(Sequence.document(next_id, slot, "embed", tokens, DocumentPayload(first_id)))
        next_id += 1
    return sequences, images


def run_dry(scheduler: Scheduler, most: int = 100_000) -> list[Step]:
    steps = []
    while (step := scheduler.schedule()) is not None:
        assert step.num_parts > 0
        steps.append(step)
        assert len(steps) < most, "the scheduler does not come to an end"
    return steps


def cost(step: Step) -> int:
    return step.num_tokens + sum(batch.price for batch in step.cached)


def tokens_by_request(step: Step | None) -> dict[int, int]:
    """What each request is given in a step, cached batches at their price."""
    given: dict[int, int] = {}
    for chunk in step.chunks if step is not None else ():
        request_id = chunk.sequence.request_id
        given[request_id] = given.get(request_id, 0) + len(chunk)
    for batch in step.cached if step is not None else ():
        given[batch.request_id] = given.get(batch.request_id, 0) + batch.price
    return given


Work = tuple[list[Sequence], list[CachedBatch]]


@st.composite
def limits(draw: st.DrawFn) -> StepLimits:
    return StepLimits(draw(st.integers(7, 200)), draw(st.integers(1, 30)), draw(st.booleans()))


@st.composite
def work(draw: st.DrawFn, step: StepLimits, request_id: int, first_id: int) -> Work:
    """Texts, queries with documents and cached batches, or pairs behind a prefix."""
    longest = 3 * step.tokens if step.chunked else step.tokens
    lengths = st.lists(st.integers(1, longest), max_size=12)
    prices = draw(st.lists(st.integers(1, 2 * step.tokens), max_size=6))
    kind = draw(
        st.sampled_from(["texts", "two stages", "pairs"] if step.chunked else ["texts", "two stages"])
    )
    if kind == "texts":
        return texts(request_id, draw(lengths), first_id), [cached(request_id, price) for price in prices]
    if kind == "pairs":
        own = draw(st.lists(st.integers(1, longest), min_size=1, max_size=12))
        return pairs(request_id, draw(st.integers(1, longest)), own, first_id), []
    queries = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    return two_stage(request_id, queries, draw(lengths), prices, first_id)


@dataclass
class Waiting:
    """What must be waiting, worked out the plain way from what was admitted, cancelled and scheduled."""

    limits: StepLimits
    sequences: dict[int, Sequence] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    cached: list[CachedBatch] = field(default_factory=list)
    divisor: int = 1
    reduced_steps: int = 0

    def admit(self, sequences: list[Sequence], batches: list[CachedBatch]) -> None:
        for sequence in sequences:
            self.sequences[sequence.sequence_id] = sequence
            self.done[sequence.sequence_id] = sequence.shared_prefix_len
        self.cached += batches

    def cancel(self, request_id: int) -> None:
        self.sequences = {i: s for i, s in self.sequences.items() if s.request_id != request_id}
        self.cached = [batch for batch in self.cached if batch.request_id != request_id]

    def reduce_budget(self, steps: int) -> None:
        self.divisor = min(64, 2 * self.divisor)
        self.reduced_steps = steps

    def check_counts(self, scheduler: Scheduler) -> None:
        left = sum(len(sequence) - self.done[i] for i, sequence in self.sequences.items())
        partial = [i for i, s in self.sequences.items() if self.done[i] > s.shared_prefix_len]
        requests = {s.request_id for s in self.sequences.values()} | {b.request_id for b in self.cached}
        assert scheduler.waiting_tokens == left + sum(batch.price for batch in self.cached)
        assert scheduler.waiting_sequences == len(self.sequences)
        assert scheduler.waiting_cached == len(self.cached)
        assert scheduler.waiting_requests == len(requests)
        assert len(partial) <= 1, "one sequence is mid-prefill at a time"
        assert scheduler.is_mid_prefill == bool(partial)

    def check_step(self, step: Step | None) -> None:
        """Checks a step against what waits, and takes it from there."""
        assert (step is None) == (not self.sequences and not self.cached)
        if step is None:
            return
        budget = self.limits.tokens
        if self.reduced_steps:
            budget = max(1, budget // self.divisor)
            self.reduced_steps -= 1
        else:
            self.divisor = 1
        assert len(step.chunks) <= self.limits.sequences
        if cost(step) > budget:
            assert step.num_parts == 1, "what is larger than the budget is alone"
            assert step.cached or not self.limits.chunked, "a sequence that can be cut is"
        for chunk in step.chunks:
            sequence = self.sequences[chunk.sequence.sequence_id]
            assert sequence is chunk.sequence
            assert len(chunk) > 0
            assert chunk.start == self.done[sequence.sequence_id], "tokens in order, each once"
            assert sequence.waits_for not in self.sequences, "after its query or prefix"
            self.done[sequence.sequence_id] = chunk.stop
            assert self.limits.chunked or chunk.is_last
            if chunk.is_last:
                del self.sequences[sequence.sequence_id]
        for batch in step.cached:
            assert batch.waits_for not in self.sequences, "after its query"
            self.cached.remove(batch)


@dataclass
class PlainOrder:
    """The order of work for sequences that wait for nothing and are not cut, without any bookkeeping: all
    requests are looked at for every choice. Gives what each request is given in a step."""

    budget: int
    weights: dict[str, float]
    share: float
    overdue_share: float
    waiting: dict[int, tuple[tuple[str, int], list[int]]] = field(default_factory=dict)
    arrivals: dict[int, int] = field(default_factory=dict)
    due: dict[int, int] = field(default_factory=dict)
    run: int = 0
    times: dict[tuple[str, int], float] = field(default_factory=dict)
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    joined: int = 0
    now: float = 0.0
    credit: float = 0.0
    passed_over: int | None = None

    def admit(self, request_id: int, lengths: list[int], tenant: str, priority: int) -> None:
        group = (tenant, priority)
        if group not in self._groups():
            self._advance()
            self.times[group] = max(self.now, self.times.get(group, 0.0))
            self.numbers[group] = self.joined = self.joined + 1
        if request_id not in self.waiting:
            self.arrivals[request_id] = len(self.arrivals)
        own, waiting = self.waiting.get(request_id, (group, []))
        self.waiting[request_id] = (own, sorted(waiting + lengths))
        in_all = sum(length for _, each in self.waiting.values() for length in each)
        self.due.setdefault(request_id, self.run + in_all)

    def step(self) -> dict[int, int]:
        given: dict[int, int] = {}
        part = self._share_of_oldest() * self.budget
        self.credit = min(self.credit + part, self.budget)
        if self.credit > 0:
            while self.waiting and self.credit > -part:
                taken = self._give(self._oldest(), given)
                if not taken:
                    break
                self.credit -= taken
        elif self.passed_over is not None:
            request_id, self.passed_over = self.passed_over, None
            if request_id in self.waiting:
                self._give(request_id, given)
        aside: set[int] = set()
        while sum(given.values()) < self.budget and (left := [r for r in self.waiting if r not in aside]):
            first = min(left, key=self._rank)
            if not self._give(first, given):
                aside.add(first)
                if self.passed_over is None or self.passed_over not in self.waiting:
                    self.passed_over = first
        self._advance()
        if not self.waiting:
            self.times, self.now, self.credit = {}, 0.0, 0.0
        return given

    def _oldest(self) -> int:
        return min(self.waiting, key=lambda request_id: self.arrivals[request_id])

    def _share_of_oldest(self) -> float:
        if not self.waiting or self.run <= self.due[self._oldest()]:
            return self.share
        group, _ = self.waiting[self._oldest()]
        part = self._weight(group) / sum(map(self._weight, self._groups()))
        return max(self.share, min(self.overdue_share, part / 2))

    def _weight(self, group: tuple[str, int]) -> float:
        tenant, priority = group
        together = sum(2.0**-p for t, p in self._groups() if t == tenant)
        return self.weights.get(tenant, 1.0) * 2.0**-priority / max(1.0, together)

    def _groups(self) -> set[tuple[str, int]]:
        return {group for group, _ in self.waiting.values()}

    def _rank(self, request_id: int) -> tuple[float, int, int, int]:
        group, lengths = self.waiting[request_id]
        return self.times[group], self.numbers[group], int(math.log2(sum(lengths))), self.arrivals[request_id]

    def _give(self, request_id: int, given: dict[int, int]) -> int:
        group, lengths = self.waiting[request_id]
        fitting = bisect_right(lengths, self.budget - sum(given.values()))
        if not fitting:
            return 0
        weight = self._weight(group)
        length = lengths.pop(fitting - 1)
        self.run += length
        later = min(self.times[group] + length / weight, self.now + 4 * self.budget / weight)
        self.times[group] = max(self.times[group], later)
        given[request_id] = given.get(request_id, 0) + length
        if not lengths:
            del self.waiting[request_id]
        return length

    def _advance(self) -> None:
        if groups := self._groups():
            self.now = max(self.now, min(self.times[group] for group in groups))
