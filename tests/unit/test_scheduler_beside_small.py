"""While small requests come, steps have little of large ones, so that nobody waits for a long step."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.scheduler import BesideSmall, Scheduler, Step, StepLimits
from maxsimd.scheduler.policy import _STEPS_BESIDE_SMALL
from tests.unit.scheduled_requests import run_dry, texts, tokens_by_request


def scheduled(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def total(steps: list[Step]) -> dict[int, int]:
    """The tokens of each request in all steps."""
    counts: Counter[int] = Counter()
    for step in steps:
        counts.update(tokens_by_request(step))
    return dict(counts)


def beside_small(chunked: bool = False) -> Scheduler:
    return Scheduler(StepLimits(100, 1000, chunked, beside_small=BesideSmall(25, 40)), oldest_share=0.125)


@pytest.mark.parametrize("chunked", [False, True])
def test_while_small_requests_come_large_ones_have_a_part_of_each_step(chunked: bool) -> None:
    scheduler = beside_small(chunked)
    scheduler.admit(0, texts(0, [5] * 10_000))
    assert scheduled(scheduler).num_tokens == 100
    scheduler.admit(1, texts(1, [15]))
    assert tokens_by_request(scheduled(scheduler)) == {0: 10, 1: 15}
    for _ in range(_STEPS_BESIDE_SMALL - 1):
        assert scheduled(scheduler).num_tokens == 40
    assert scheduled(scheduler).num_tokens == 100, "none has come for a while"
    scheduler.admit(2, texts(2, [45]))
    assert scheduled(scheduler).num_tokens == 100, "it is not small"


def test_small_requests_by_themselves_fill_whole_steps() -> None:
    scheduler = beside_small()
    for request_id in range(40):
        scheduler.admit(request_id, texts(request_id, [5]))
    assert [step.num_tokens for step in run_dry(scheduler)] == [100, 100]


def test_small_requests_use_what_large_ones_may_not() -> None:
    scheduler = beside_small()
    scheduler.admit(0, texts(0, [5] * 100))
    for request_id in range(1, 16):
        scheduler.admit(request_id, texts(request_id, [5, 5]))
    by_request = tokens_by_request(scheduled(scheduler))
    assert sum(by_request.values()) == 100
    assert by_request[0] <= 25


def test_what_is_longer_than_the_part_of_large_requests_is_run_alone_or_cut() -> None:
    for chunked, expected in ((False, [10, 90]), (True, [40, 60])):
        scheduler = beside_small(chunked)
        scheduler.admit(0, texts(0, [90, 10]))
        scheduler.admit(1, texts(1, [40]))
        scheduler.cancel(1)
        steps = run_dry(scheduler)
        assert [step.num_tokens for step in steps] == expected
        assert total(steps) == {0: 100}


@pytest.mark.parametrize(("with_one", "without"), [(0, 10), (10, 101), (20, 10)])
def test_the_parts_beside_small_requests_are_parts_of_a_step(with_one: int, without: int) -> None:
    with pytest.raises(ValueError, match="beside_small must be from 1 to 100 and not fall, not"):
        StepLimits(100, 10, chunked=False, beside_small=BesideSmall(with_one, without))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 120), min_size=1, max_size=30), min_size=1, max_size=12),
    st.booleans(),
    st.lists(st.integers(1, 100), min_size=2, max_size=2).map(sorted),
)
def test_nothing_is_lost_or_doubled_beside_small_requests(
    requests: list[list[int]], chunked: bool, parts: list[int]
) -> None:
    scheduler = Scheduler(StepLimits(100, 50, chunked, beside_small=BesideSmall(*parts)))
    expected: dict[int, int] = {}
    steps = []
    for request_id, lengths in enumerate(requests):
        lengths = lengths if chunked else [min(length, 100) for length in lengths]
        scheduler.admit(request_id, texts(request_id, lengths))
        expected[request_id] = sum(lengths)
        if request_id % 2:
            steps.append(scheduled(scheduler))
    steps += run_dry(scheduler)
    assert total(steps) == expected
    assert all(step.num_tokens <= 100 for step in steps)
