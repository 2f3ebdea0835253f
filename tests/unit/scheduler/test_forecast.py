"""How much is run before a request that comes now, beside what the scheduler then does."""

import random

import pytest

from maxsimd.scheduler import Scheduler, ServiceRate, StepLimits, WaitErrors
from maxsimd.scheduler.forecast import work_ahead
from tests.unit.scheduler.scheduled_requests import texts

BUDGET = 100
ME = ("", 0)


def _ahead(tokens: int, waiting: list[tuple[tuple[str, int], int]], **weights: float) -> int:
    return work_ahead(tokens, ME, waiting, weights, 1 / 8)


def test_nothing_is_ahead_where_nothing_waits() -> None:
    assert _ahead(50, []) == 0


def test_requests_of_the_same_class_and_of_lower_ones_go_before() -> None:
    assert _ahead(70, [(ME, 127), (ME, 64), (ME, 5)]) == 196


def test_larger_requests_get_the_share_of_the_oldest_one_after_the_other() -> None:
    assert _ahead(70, [(ME, 10_000), (ME, 10_000)]) == 10
    assert _ahead(700, [(ME, 2000), (ME, 10_000), (ME, 700)]) == 700 + 200
    assert _ahead(70, [(ME, 70), (ME, 10_000)]) == 70, "the oldest is counted already"
    assert _ahead(7000, [(ME, 8192), *[(ME, 7000)] * 9]) == 9 * 7000 + 8192
    assert _ahead(7000, [*[(ME, 7000)] * 9, (ME, 8192)]) == 9 * 7000, "its turn comes later"


def test_larger_requests_get_no_more_than_they_need() -> None:
    assert _ahead(16_383, [(ME, 16_384), *[(ME, 16_383)] * 20]) == 20 * 16_383 + 16_384


def test_what_larger_ones_get_is_taken_from_their_own_group() -> None:
    """Of four tokens, the others get two; of the rest, the larger one gets half a token."""
    assert _ahead(150, [(ME, 10_000), (("other", 0), 10_000)]) == 200 + 50


def test_other_tenants_run_beside_as_their_weights_allow() -> None:
    others = [(("other", 0), 5000)]
    assert _ahead(100, others) == 100
    assert _ahead(100, others, other=3) == 300
    assert _ahead(100, [*others, (("third", 0), 20), (ME, 70)]) == 70 + 170 + 20


def test_priorities_divide_their_tenants_share() -> None:
    """Of a tenant whose only other priority weighs half, a third runs beside two thirds."""
    assert _ahead(100, [(("", 1), 5000)]) == 50
    assert _ahead(100, [(("", -1), 5000)]) == 200
    assert _ahead(100, [(("other", -3), 5000)]) == 100, "no tenant takes from another by its choice"
    assert _ahead(100, [(("other", 2), 5000)]) == 25, "what can wait lets other tenants pass"


def _run_before(scheduler: Scheduler, draw: random.Random, tenants: tuple[str, ...]) -> tuple[int, int]:
    """How many tokens were forecast to be run before a new request among random others, and how many were."""
    for number in range(40):
        lengths = [draw.randint(1, BUDGET // 5) for _ in range(draw.choice((1, 5, 60)))]
        scheduler.admit(number, texts(number, lengths, 1000 * number), tenant=draw.choice(tenants))
    own = [draw.randint(1, BUDGET // 5) for _ in range(draw.choice((8, 30)))]
    forecast = scheduler.work_ahead(sum(own))
    scheduler.admit(99, texts(99, own, 99_000))
    left, before = len(own), 0
    while left:
        step = scheduler.schedule()
        assert step is not None
        mine = [chunk for chunk in step.chunks if chunk.sequence.request_id == 99]
        left -= len(mine)
        before += step.num_tokens - sum(map(len, mine))
    return forecast, before


@pytest.mark.parametrize("seed", range(10))
def test_the_scheduler_does_as_was_forecast(seed: int) -> None:
    """But for some steps: which request is the oldest changes, and whether it is overdue."""
    scheduler = Scheduler(StepLimits(BUDGET, 1000, chunked=False))
    forecast, before = _run_before(scheduler, random.Random(seed), ("",))
    assert -4 * BUDGET < before - forecast < 10 * BUDGET


@pytest.mark.parametrize("seed", range(10))
def test_between_tenants_it_does_about_as_was_forecast(seed: int) -> None:
    scheduler = Scheduler(StepLimits(BUDGET, 1000, chunked=False), weights={"heavy": 3})
    forecast, before = _run_before(scheduler, random.Random(seed), ("", "light", "heavy"))
    assert forecast / 2.5 - BUDGET < before < 2.5 * forecast + BUDGET


def test_who_is_coming_counts_as_waiting() -> None:
    scheduler = Scheduler(StepLimits(BUDGET, 1000, chunked=False))
    scheduler.admit(1, texts(1, [50], 0))
    assert scheduler.work_ahead(60, coming=[(ME, 40), (ME, 5000)]) == 90
    assert scheduler.work_ahead(60, priority=100, coming=[(("", 8), 40)]) == 40 + 50


def test_the_rate_is_that_of_full_steps() -> None:
    rate = ServiceRate(BUDGET)
    rate.observe(49, 1.0)
    assert rate.tokens_per_second is None
    assert rate.seconds(10) is None
    rate.observe(50, 0.5)
    assert rate.tokens_per_second == 100
    assert rate.seconds(25) == 0.25
    rate.observe(1, 1000.0)
    assert rate.tokens_per_second == 100


def test_a_step_that_took_no_time_is_no_measurement() -> None:
    rate = ServiceRate(BUDGET)
    rate.observe(BUDGET, 0.0)
    assert rate.tokens_per_second is None


def test_newer_steps_count_more() -> None:
    rate = ServiceRate(BUDGET)
    rate.observe(100, 10.0)
    rate.observe(1000, 10.0)
    assert rate.tokens_per_second == pytest.approx((50 + 1000) / 15)


def test_a_wait_is_expected_to_be_as_much_longer_as_those_before() -> None:
    errors = WaitErrors()
    assert errors.factor(100, 0.0) == 1.0
    errors.observe(100, 1.0, 7.0, 0.0)
    assert errors.factor(100, 0.0) == (7 + 2) / (1 + 2)
    assert errors.factor(65, 0.0) == 3.0, "of the same class of size"
    assert errors.factor(63, 0.0) == errors.factor(128, 0.0) == 1.0
    assert errors.factor(100, 10.0) == (3.5 + 2) / (0.5 + 2), "after ten seconds it counts half"
    errors.observe(100, 2.0, 2.0, 10.0)
    assert errors.factor(100, 10.0) == (3.5 + 2 + 2) / (0.5 + 2 + 2)


def test_a_wait_is_expected_to_be_from_one_to_four_times_as_long() -> None:
    errors = WaitErrors()
    errors.observe(100, 1.0, 1000.0, 0.0)
    errors.observe(10, 50.0, -1.0, 0.0)
    assert errors.factor(100, 0.0) == 4.0
    assert errors.factor(10, 0.0) == 1.0
    assert errors.factor(100, -1.0) == 4.0
