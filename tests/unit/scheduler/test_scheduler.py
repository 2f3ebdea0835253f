"""What must hold of every step, whatever is admitted, cancelled and scheduled in whatever order."""

import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.scheduler import ResultSlot, Scheduler, Sequence, StepLimits, Tokens
from tests.unit.scheduler.scheduled_requests import (
    PlainOrder,
    Waiting,
    cached,
    cost,
    limits,
    query,
    run_dry,
    texts,
    tokens_by_request,
    two_stage,
    work,
)

OPERATIONS = ["admit", "admit", "admit", "add", "cancel", "schedule", "schedule", "schedule", "reduce"]


@settings(max_examples=60, deadline=None)
@given(limits(), st.data())
def test_every_step_is_sound_and_the_counts_are_exact(step_limits: StepLimits, data: st.DataObject) -> None:
    """Budget and number of sequences, every token once and in order, queries first, one partial prefill."""
    scheduler = Scheduler(
        step_limits, weights={"heavy": 3.0}, oldest_share=data.draw(st.sampled_from([0.05, 0.5]))
    )
    waiting = Waiting(step_limits)
    next_id = 0
    admitted = 0
    for operation in data.draw(st.lists(st.sampled_from(OPERATIONS), max_size=25)):
        if operation in ("admit", "add"):
            admitted += operation == "admit" or not admitted
            sequences, batches = data.draw(work(step_limits, admitted - 1, next_id))
            next_id += len(sequences)
            tenant = data.draw(st.sampled_from(["", "heavy", "light"]))
            priority, in_order = data.draw(st.integers(-10, 10)), data.draw(st.booleans())
            scheduler.admit(admitted - 1, sequences, batches, priority, tenant, in_order=in_order)
            waiting.admit(sequences, batches)
        elif operation == "cancel":
            request_id = data.draw(st.integers(0, admitted))
            scheduler.cancel(request_id)
            waiting.cancel(request_id)
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


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_order_is_the_plain_one(data: st.DataObject) -> None:
    budget = data.draw(st.integers(20, 200))
    weights = {"heavy": 3.0, "light": 0.25}
    share = data.draw(st.sampled_from([0.05, 0.125, 0.5]))
    overdue = data.draw(st.sampled_from([0.0, 0.25, 0.5]))
    limits = StepLimits(budget, 10_000, chunked=False)
    scheduler = Scheduler(limits, weights=weights, oldest_share=share, overdue_share=overdue)
    plain = PlainOrder(budget, weights, share, overdue)
    request_id = 0
    for _ in range(data.draw(st.integers(1, 30))):
        for _ in range(data.draw(st.integers(0, 3))):
            lengths = data.draw(st.lists(st.integers(1, budget), min_size=1, max_size=12))
            tenant = data.draw(st.sampled_from(["", "heavy", "light"]))
            priority = data.draw(st.integers(-2, 2))
            scheduler.admit(request_id, texts(request_id, lengths), priority=priority, tenant=tenant)
            plain.admit(request_id, lengths, tenant, priority)
            request_id += 1
        assert tokens_by_request(scheduler.schedule()) == plain.step()
    while plain.waiting:
        assert tokens_by_request(scheduler.schedule()) == plain.step()


@settings(max_examples=40, deadline=None)
@given(limits(), st.data())
def test_nothing_of_a_cancelled_request_is_scheduled_or_held(limits: StepLimits, data: st.DataObject) -> None:
    scheduler = Scheduler(limits)
    references = []
    for request_id in range(3):
        ids = np.zeros(data.draw(st.integers(1, limits.tokens)), dtype=np.int32)
        references.append(weakref.ref(ids))
        shared = Tokens(ids)
        sequences = [Sequence.text(i, ResultSlot(request_id, i), "", shared) for i in range(3)]
        sequences.append(Sequence.query(3, request_id, "", shared, 2))
        scheduler.admit(request_id, sequences, [cached(request_id, 5, 3)])
        del ids, shared, sequences
    for _ in range(data.draw(st.integers(0, 4))):
        scheduler.schedule()
    cancelled = data.draw(st.integers(0, 2))
    scheduler.cancel(cancelled)
    assert references[cancelled]() is None
    scheduler.cancel(cancelled)
    for step in run_dry(scheduler):
        assert cancelled not in tokens_by_request(step)
    step = None
    assert all(reference() is None for reference in references)
    assert scheduler.waiting_tokens == scheduler.waiting_requests == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(10, 400), min_size=150, max_size=400), st.integers(1, 5), st.integers(800, 3000))
def test_steps_are_filled_while_enough_waits(lengths: list[int], requests: int, budget: int) -> None:
    """At least 95% of the budget over all steps that had more than a full step waiting."""
    if len(set(lengths)) < 20:
        lengths = [*lengths, *range(10, 30)]
    scheduler = Scheduler(StepLimits(budget, 10_000, chunked=False))
    for request_id in range(requests):
        scheduler.admit(request_id, texts(request_id, lengths[request_id::requests]))
    used = available = 0
    while scheduler.waiting_tokens > 2 * budget:
        step = scheduler.schedule()
        assert step is not None
        used += step.num_tokens
        available += budget
    assert available == 0 or used >= 0.95 * available


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64), st.integers(0, 30))
def test_a_causal_model_fills_every_step_to_the_brim(budget: int, seed: int) -> None:
    """Also where what fills a step is ready only once a query is complete in it."""
    lengths = [int(length) for length in np.random.default_rng(seed).integers(1, 200, 40)]
    scheduler = Scheduler(StepLimits(budget, 10_000, chunked=True))
    scheduler.admit(0, texts(0, lengths[:20]))
    scheduler.admit(1, two_stage(1, lengths[20:23], lengths[23:], [], first_id=100)[0])
    steps = run_dry(scheduler)
    assert all(step.num_tokens == budget for step in steps[:-1])


@pytest.mark.parametrize(("tenants", "lengths"), [(1, [30, 60, 70]), (10_000, [1500])])
def test_a_step_takes_hardly_longer_with_forty_times_as_many(tenants: int, lengths: list[int]) -> None:
    """Also where nothing of most fits. The best of some, because the machine may be busy."""

    def seconds_of_a_step(num_requests: int) -> float:
        scheduler = Scheduler(StepLimits(2048, 10_000, chunked=False))
        for request_id in range(num_requests):
            scheduler.admit(request_id, texts(request_id, lengths), tenant=str(request_id % tenants))
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            assert scheduler.schedule() is not None
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    assert seconds_of_a_step(10_000) < 10 * seconds_of_a_step(250)


def test_a_step_holds_its_budget_exactly() -> None:
    scheduler = Scheduler(StepLimits(100, 10, chunked=False))
    scheduler.admit(0, texts(0, [60, 41, 40]), [cached(0, 1)])
    assert [cost(step) for step in run_dry(scheduler)] == [100, 42]
    scheduler.admit(0, [query(0, 1, 50, num_consumers=0)])
    assert [step.num_tokens for step in run_dry(scheduler)] == [50], "a query without consumers"
