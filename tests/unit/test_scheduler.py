"""The scheduling policy, simulated: what must hold whatever comes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.scheduler import Role, Scheduler, Sequence, Step, StepLimits


def make_request(
    request: int, lengths: list[int], first_key: int, queries: list[int] | None = None
) -> list[Sequence]:
    """Sequences of the given lengths; with `queries`, documents that go round these queries."""
    sequences = []
    keys = []
    for i, length in enumerate(queries or []):
        uses = len(range(i, len(lengths), len(queries or [])))
        keys.append(first_key + i)
        ids = np.zeros(length, dtype=np.int32)
        sequences.append(Sequence(first_key + i, request, i, Role.QUERY, "task", ids, uses=max(1, uses)))
    for i, length in enumerate(lengths):
        query = keys[i % len(keys)] if keys else None
        role = Role.DOCUMENT if keys else Role.TEXT
        ids = np.zeros(length, dtype=np.int32)
        sequences.append(Sequence(first_key + len(keys) + i, request, i, role, "task", ids, query=query))
    return sequences


def make_sharing_request(request: int, lengths: list[int], first_key: int, prefix: int) -> list[Sequence]:
    """A prefix, and pairs that begin with it and have so many tokens of their own."""
    ids = np.zeros(prefix, dtype=np.int32)
    sequences = [Sequence(first_key, request, -1, Role.PREFIX, "", ids, uses=len(lengths))]
    for i, length in enumerate(lengths):
        ids = np.zeros(prefix + length, dtype=np.int32)
        key = first_key + 1 + i
        sequences.append(Sequence(key, request, i, Role.PAIR, "task", ids, prefix=first_key, shared=prefix))
    return sequences


def run_dry(scheduler: Scheduler, most: int = 100_000) -> list[Step]:
    steps = []
    while (step := scheduler.schedule()) is not None:
        steps.append(step)
        assert len(steps) < most, "the scheduler does not come to an end"
    return steps


@st.composite
def workloads(draw: st.DrawFn) -> tuple[StepLimits, list[tuple[list[Sequence], int]]]:
    """Limits, and requests with priorities: texts, queries with documents, or pairs that share a prefix."""
    chunked = draw(st.booleans())
    budget = draw(st.integers(7, 300))
    limits = StepLimits(budget, draw(st.integers(1, 40)), chunked)
    longest = 3 * budget if chunked else budget
    requests = []
    key = 0
    for request in range(draw(st.integers(1, 6))):
        lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=30))
        queries = draw(st.none() | st.lists(st.integers(1, longest), min_size=1, max_size=4))
        queries = queries[: len(lengths)] if queries else None
        if chunked and draw(st.booleans()):
            sequences = make_sharing_request(request, lengths, key, draw(st.integers(1, longest)))
        else:
            sequences = make_request(request, lengths, key, queries)
        key += len(sequences)
        requests.append((sequences, draw(st.integers(-3, 3))))
    return limits, requests


@given(workloads(), st.data())
def test_every_token_is_scheduled_once_within_budget_and_after_its_query(
    workload: tuple[StepLimits, list[tuple[list[Sequence], int]]], data: st.DataObject
) -> None:
    limits, requests = workload
    scheduler = Scheduler(limits)
    steps: list[Step] = []
    for request, (sequences, priority) in enumerate(requests):
        scheduler.admit(request, sequences, priority)
        for _ in range(data.draw(st.integers(0, 2))):
            step = scheduler.schedule()
            if step is not None:
                steps.append(step)
    steps += run_dry(scheduler)

    done: dict[int, int] = {}
    finished_at: dict[int, int] = {}
    for i, step in enumerate(steps):
        assert step.num_tokens <= limits.tokens
        assert len(step.chunks) <= limits.sequences
        for chunk in step.chunks:
            assert len(chunk) > 0
            done_before = done.get(chunk.sequence.key, chunk.sequence.shared)
            assert chunk.start == done_before, "tokens in order, each once"
            assert limits.chunked or chunk.is_whole
            done[chunk.sequence.key] = chunk.stop
            if chunk.is_last:
                finished_at[chunk.sequence.key] = i
        # A query and its documents may share a step, but none may come before it; so with prefixes.
        for chunk in step.chunks:
            if chunk.sequence.query is not None and chunk.is_last:
                assert finished_at[chunk.sequence.query] <= i
            if chunk.sequence.prefix is not None:
                assert finished_at[chunk.sequence.prefix] <= i
    for sequences, _ in requests:
        for sequence in sequences:
            assert done[sequence.key] == len(sequence)
    assert scheduler.waiting_tokens == 0
    assert scheduler.waiting_sequences == 0


@given(workloads(), st.integers(0, 5), st.integers(0, 5))
def test_nothing_is_scheduled_after_cancel(
    workload: tuple[StepLimits, list[tuple[list[Sequence], int]]], cancelled: int, before: int
) -> None:
    limits, requests = workload
    cancelled %= len(requests)
    scheduler = Scheduler(limits)
    for request, (sequences, priority) in enumerate(requests):
        scheduler.admit(request, sequences, priority)
    for _ in range(before):
        scheduler.schedule()
    scheduler.cancel(cancelled)
    others = run_dry(scheduler)
    assert all(chunk.sequence.request != cancelled for step in others for chunk in step.chunks)
    assert scheduler.waiting_tokens == 0


@given(
    st.lists(st.integers(10, 400), min_size=150, max_size=400),
    st.integers(1, 5),
    st.integers(800, 3000),
)
def test_steps_are_filled_while_enough_waits(lengths: list[int], requests: int, budget: int) -> None:
    """At least 95% of the budget over all steps that had more than a full step waiting."""
    if len(set(lengths)) < 20:
        lengths = [*lengths, *range(10, 30)]
    scheduler = Scheduler(StepLimits(budget, 10_000, chunked=False))
    for request in range(requests):
        scheduler.admit(request, make_request(request, lengths[request::requests], request * 1000))
    used = available = 0
    while scheduler.waiting_tokens > 2 * budget:
        step = scheduler.schedule()
        assert step is not None
        used += step.num_tokens
        available += budget
    assert available == 0 or used >= 0.95 * available


@given(st.integers(1, 64), st.integers(0, 30))
def test_a_causal_model_fills_every_step_to_the_brim(budget: int, seed: int) -> None:
    lengths = [int(length) for length in np.random.default_rng(seed).integers(1, 200, 40)]
    scheduler = Scheduler(StepLimits(budget, 10_000, chunked=True))
    scheduler.admit(0, make_request(0, lengths, 0))
    steps = run_dry(scheduler)
    assert all(step.num_tokens == budget for step in steps[:-1])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("length", [1, 60, 512])
def test_one_document_behind_ten_thousand_is_scheduled_within_two_steps(length: int, chunked: bool) -> None:
    scheduler = Scheduler(StepLimits(2048, 512, chunked))
    lengths = [int(length) for length in np.random.default_rng(0).integers(20, 400, 10_000)]
    scheduler.admit(0, make_request(0, lengths, 0, queries=[30]))
    for _ in range(3):
        scheduler.schedule()
    scheduler.admit(1, make_request(1, [length], 20_000, queries=[12]))
    steps = [scheduler.schedule(), scheduler.schedule()]
    keys = {chunk.sequence.key for step in steps if step for chunk in step.chunks if chunk.is_last}
    assert {20_000, 20_001} <= keys


@given(st.integers(0, 1000), st.integers(1, 12))
def test_a_long_sequence_waits_no_longer_than_for_a_turn_of_those_before_it(seed: int, before: int) -> None:
    """Requests with a large backlog stand before it and short new ones keep coming, enough to fill every
    step without it; still it is run once each of those before it has been first in turn."""
    random = np.random.default_rng(seed)

    def short(request: int, count: int) -> list[Sequence]:
        return make_request(request, [int(n) for n in random.integers(5, 60, count)], request * 10_000)

    scheduler = Scheduler(StepLimits(512, 512, chunked=False))
    for request in range(before):
        scheduler.admit(request, short(request, 300))
    scheduler.admit(1_000, make_request(1_000, [500], 0))
    waited = 0
    while True:
        scheduler.admit(2_000 + waited, short(2_000 + waited, 20))
        step = scheduler.schedule()
        assert step is not None
        if any(chunk.sequence.request == 1_000 for chunk in step.chunks):
            break
        assert step.num_tokens > 400, "the others fill the step without it"
        waited += 1
        assert waited <= before, "the long sequence was starved"
    assert waited > 0, "it did not have to wait, so this shows nothing"


def test_a_very_long_prefill_leaves_room_for_others() -> None:
    scheduler = Scheduler(StepLimits(100, 512, chunked=True))
    scheduler.admit(0, make_request(0, [10_000], 0))
    scheduler.schedule()
    scheduler.admit(1, make_request(1, [30], 1))
    step = scheduler.schedule()
    assert step is not None
    assert {chunk.sequence.key for chunk in step.chunks} == {0, 1}


def test_a_lower_priority_number_gets_a_larger_share() -> None:
    scheduler = Scheduler(StepLimits(1000, 512, chunked=False))
    for request, priority in ((0, 2), (1, 0)):
        scheduler.admit(request, make_request(request, [10] * 2000, request * 10_000), priority)
    tokens = {0: 0, 1: 0}
    for _ in range(10):
        step = scheduler.schedule()
        assert step is not None
        for chunk in step.chunks:
            tokens[chunk.sequence.request] += len(chunk)
    assert tokens[1] == pytest.approx(4 * tokens[0], rel=0.1)


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(StepLimits(100, 512, chunked=False))
    with pytest.raises(ValueError, match="101 tokens do not fit"):
        scheduler.admit(0, make_request(0, [101], 0))
    assert scheduler.waiting_sequences == 0


def test_a_reduced_budget_still_runs_whole_sequences_and_recovers() -> None:
    scheduler = Scheduler(StepLimits(100, 512, chunked=False))
    scheduler.reduce_budget(steps=2)
    scheduler.admit(0, make_request(0, [90, 30, 20, 50, 50], 0))
    sizes = [step.num_tokens for step in run_dry(scheduler)]
    assert sizes[:2] == [50, 50]
    assert sum(sizes) == 240
    assert sizes[2] > 50


def test_a_step_splits_into_halves_that_hold_all_of_it() -> None:
    scheduler = Scheduler(StepLimits(100, 512, chunked=False))
    scheduler.admit(0, make_request(0, [5, 6, 7], 0))
    step = scheduler.schedule()
    assert step is not None
    first, second = step.halves()
    assert (*first.chunks, *second.chunks) == step.chunks
    assert first.id == second.id == step.id
