"""Rules that hold for every step, in any order of admitting, cancelling and scheduling."""

import math
import time
import weakref
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.scheduler import CachedBatch, ResultSlot, Scheduler, Step, StepLimits, Tokens, TokenSequence
from tests.unit.scheduler import scheduled_requests as made

Work = tuple[list[TokenSequence], list[CachedBatch]]


@st.composite
def limits(draw: st.DrawFn) -> StepLimits:
    return StepLimits(draw(st.integers(7, 200)), draw(st.integers(1, 30)), draw(st.booleans()))


@st.composite
def work(draw: st.DrawFn, step: StepLimits, request_id: int, first_id: int) -> Work:
    """Texts, queries with documents and cached batches, or pairs behind a prefix."""
    longest = 3 * step.tokens if step.chunked else step.tokens
    lengths = st.lists(st.integers(1, longest), max_size=12)
    prices = draw(st.lists(st.integers(1, 2 * step.tokens), max_size=6))
    kind = draw(st.sampled_from(["texts", "stages", "pairs"] if step.chunked else ["texts", "stages"]))
    if kind == "texts":
        batches = [made.cached(request_id, price) for price in prices]
        return made.texts(request_id, draw(lengths), first_id), batches
    if kind == "pairs":
        own = draw(st.lists(st.integers(1, longest), min_size=1, max_size=12))
        return made.pairs(request_id, draw(st.integers(1, longest)), own, first_id), []
    queries = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    return made.two_stage(request_id, queries, draw(lengths), prices, first_id)


@dataclass
class Waiting:
    """The sequences that must be waiting, worked out plainly from those admitted, cancelled and scheduled."""

    limits: StepLimits
    sequences: dict[int, TokenSequence] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    cached: list[CachedBatch] = field(default_factory=list)
    divisor: int = 1
    reduced_steps: int = 0

    def admit(self, sequences: list[TokenSequence], batches: list[CachedBatch]) -> None:
        for sequence in sequences:
            self.sequences[sequence.sequence_id] = sequence
            self.done[sequence.sequence_id] = sequence.shared_prefix_len
        self.cached += batches

    def cancel(self, request_id: int) -> None:
        self.sequences = {i: s for i, s in self.sequences.items() if s.request_id != request_id}
        self.cached = [batch for batch in self.cached if batch.request_id != request_id]

    def drop_partial(self) -> None:
        self.sequences = {i: s for i, s in self.sequences.items() if self.done[i] == s.shared_prefix_len}

    def reduce_budget(self, steps: int) -> None:
        self.divisor = min(64, 2 * self.divisor)
        self.reduced_steps = steps

    def check_counts(self, scheduler: Scheduler) -> None:
        left = sum(len(sequence) - self.done[i] for i, sequence in self.sequences.items())
        partial = [i for i, s in self.sequences.items() if self.done[i] > s.shared_prefix_len]
        requests = {s.request_id for s in self.sequences.values()} | {b.request_id for b in self.cached}
        assert scheduler.waiting_tokens == left + sum(batch.price for batch in self.cached)
        assert scheduler.waiting_sequences == len(self.sequences)
        assert (scheduler.waiting_cached, len(scheduler._requests)) == (len(self.cached), len(requests))
        assert len(partial) <= 1, "one sequence is mid-prefill at a time"
        assert (scheduler._partial is not None) == bool(partial)

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
        if made.cost(step) > budget:
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
    """The order of uncut sequences that wait for nothing, with a look at all requests for every choice."""

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
        halves = 2 * sum(lengths) / self.budget
        size = int(math.log2(halves)) + 1 if halves >= 1 else 0
        return self.times[group], self.numbers[group], size, self.arrivals[request_id]

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


OPERATIONS = [*["admit"] * 4, "cancel", "drop", *["schedule"] * 3, "reduce"]


@settings(max_examples=40)
@given(limits(), st.data())
def test_every_step_is_sound_and_the_counts_are_exact(step_limits: StepLimits, data: st.DataObject) -> None:
    share = data.draw(st.sampled_from([0.05, 0.5]))
    scheduler = Scheduler(step_limits, weights={"heavy": 3.0}, oldest_share=share)
    waiting, next_id, admitted = Waiting(step_limits), 0, 0
    for operation in data.draw(st.lists(st.sampled_from(OPERATIONS), max_size=25)):
        if operation == "admit":
            sequences, batches = data.draw(work(step_limits, admitted, next_id))
            next_id += len(sequences)
            tenant = data.draw(st.sampled_from(["", "heavy", "light"]))
            priority, in_order = data.draw(st.integers(-10, 10)), data.draw(st.booleans())
            scheduler.admit(admitted, sequences, batches, priority, tenant, in_order=in_order)
            admitted += 1
            waiting.admit(sequences, batches)
        elif operation == "cancel":
            request_id = data.draw(st.integers(0, admitted))
            scheduler.cancel(request_id)
            waiting.cancel(request_id)
        elif operation == "drop":
            for sequence in [*waiting.sequences.values()]:
                scheduler.drop_sequence(sequence.request_id, sequence.sequence_id)
            waiting.drop_partial()
        elif operation == "reduce":
            steps = data.draw(st.integers(1, 5))
            scheduler.reduce_budget(steps)
            waiting.reduce_budget(steps)
        else:
            waiting.check_step(scheduler.schedule())
        waiting.check_counts(scheduler)
    while waiting.sequences or waiting.cached:
        waiting.check_step(scheduler.schedule())
        waiting.check_counts(scheduler)
    assert scheduler.schedule() is None


@settings(max_examples=25)
@given(st.data())
def test_the_order_is_the_plain_one(data: st.DataObject) -> None:
    budget, weights = data.draw(st.integers(20, 200)), {"heavy": 3.0, "light": 0.25}
    share = data.draw(st.sampled_from([0.05, 0.125, 0.5]))
    overdue = data.draw(st.sampled_from([0.0, 0.25, 0.5]))
    limits = StepLimits(budget, 10_000, chunked=False)
    scheduler = Scheduler(limits, weights=weights, oldest_share=share, overdue_share=overdue)
    plain = PlainOrder(budget, weights, share, overdue)
    request_id = 0
    for _ in range(data.draw(st.integers(1, 20))):
        for _ in range(data.draw(st.integers(0, 3))):
            lengths = data.draw(st.lists(st.integers(1, budget), min_size=1, max_size=8))
            tenant = data.draw(st.sampled_from(["", "heavy", "light"]))
            priority = data.draw(st.integers(-2, 2) | st.sampled_from([-20, 20]))
            scheduler.admit(request_id, made.texts(request_id, lengths), priority=priority, tenant=tenant)
            plain.admit(request_id, lengths, tenant, max(-8, min(8, priority)))
            request_id += 1
        assert made.tokens_by_request(scheduler.schedule()) == plain.step()
    while plain.waiting:
        assert made.tokens_by_request(scheduler.schedule()) == plain.step()


@settings(max_examples=40)
@given(limits(), st.data())
def test_nothing_of_a_cancelled_request_is_scheduled_or_held(limits: StepLimits, data: st.DataObject) -> None:
    scheduler, references = Scheduler(limits), []
    for request_id in range(3):
        ids = np.zeros(data.draw(st.integers(1, limits.tokens)), dtype=np.int32)
        references.append(weakref.ref(ids))
        shared = Tokens(ids)
        sequences = [TokenSequence.text(i, ResultSlot(request_id, i), "", shared) for i in range(3)]
        sequences.append(TokenSequence.query(3, request_id, "", shared, 2))
        scheduler.admit(request_id, sequences, [made.cached(request_id, 5, 3)])
        del ids, shared, sequences
    for _ in range(data.draw(st.integers(0, 4))):
        scheduler.schedule()
    cancelled = data.draw(st.integers(0, 2))
    scheduler.cancel(cancelled)
    assert references[cancelled]() is None
    scheduler.cancel(cancelled)
    for step in made.run_dry(scheduler):
        assert cancelled not in made.tokens_by_request(step)
    step = None
    assert all(reference() is None for reference in references)
    assert scheduler.waiting_tokens == len(scheduler._requests) == 0


@settings(max_examples=20)
@given(st.integers(1, 64), st.integers(0, 30))
def test_a_causal_model_fills_every_step_to_the_brim(budget: int, seed: int) -> None:
    lengths = [int(length) for length in np.random.default_rng(seed).integers(1, 200, 40)]
    scheduler = Scheduler(StepLimits(budget, 10_000, chunked=True))
    scheduler.admit(0, made.texts(0, lengths[:20]))
    scheduler.admit(1, made.two_stage(1, lengths[20:23], lengths[23:], [], first_id=100)[0])
    assert all(step.num_tokens == budget for step in made.run_dry(scheduler)[:-1])


@pytest.mark.parametrize(("tenants", "lengths"), [(1, [30, 60, 70]), (10_000, [1500])])
def test_a_step_takes_hardly_longer_with_forty_times_as_many(tenants: int, lengths: list[int]) -> None:
    """Also where nothing of most fits. The best of some, because the machine may be busy."""

    def seconds_of_a_step(num_requests: int) -> float:
        scheduler = Scheduler(StepLimits(2048, 10_000, chunked=False))
        for request_id in range(num_requests):
            scheduler.admit(request_id, made.texts(request_id, lengths), tenant=str(request_id % tenants))
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            assert scheduler.schedule() is not None
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    assert seconds_of_a_step(4_000) < 10 * seconds_of_a_step(100)
