"""How much is run before a request that comes now, beside what the scheduler then does."""

import random

import pytest

from maxsimd.scheduler import Scheduler, ServiceRate, StepLimits, WaitErrors
from maxsimd.scheduler.forecast import work_ahead
from tests.unit.scheduler.scheduled_requests import texts

BUDGET = 100
ME = ("", 0)


OTHER, THIRD = ("other", 0), ("third", 0)


@pytest.mark.parametrize(
    ("tokens", "waiting", "expected"),
    [
        pytest.param(50, [], 0, id="nothing waits"),
        pytest.param(70, [(ME, 127), (ME, 64), (ME, 5)], 196, id="the same class and lower ones"),
        pytest.param(70, [(ME, 10_000), (ME, 10_000)], 10, id="larger ones get the share of the oldest"),
        pytest.param(700, [(ME, 2000), (ME, 10_000), (ME, 700)], 700 + 200, id="one after the other"),
        pytest.param(70, [(ME, 70), (ME, 10_000)], 70, id="the oldest is counted already"),
        pytest.param(7000, [(ME, 8192), *[(ME, 7000)] * 9], 9 * 7000 + 8192, id="the oldest is larger"),
        pytest.param(7000, [*[(ME, 7000)] * 9, (ME, 8192)], 9 * 7000, id="its turn comes later"),
        pytest.param(
            16_383, [(ME, 16_384), *[(ME, 16_383)] * 20], 20 * 16_383 + 16_384, id="no more than it needs"
        ),
        # Of four tokens, the others get two; of the rest, the larger one gets half a token.
        pytest.param(150, [(ME, 10_000), (OTHER, 10_000)], 200 + 50, id="taken from its own group"),
        pytest.param(100, [(OTHER, 5000)], 100, id="another tenant runs beside"),
        pytest.param(100, [(THIRD, 5000)], 300, id="another tenant of three times the weight"),
        pytest.param(100, [(OTHER, 5000), (THIRD, 20), (ME, 70)], 70 + 170 + 20, id="two tenants"),
        # Of a tenant whose only other priority weighs half, a third runs beside two thirds.
        pytest.param(100, [(("", 1), 5000)], 50, id="a lower priority"),
        pytest.param(100, [(("", -1), 5000)], 200, id="a higher priority"),
        pytest.param(100, [(("other", -3), 5000)], 100, id="no tenant takes from another"),
        pytest.param(100, [(("other", 2), 5000)], 25, id="what can wait lets other tenants pass"),
    ],
)
def test_what_is_run_before_a_new_request(
    tokens: int, waiting: list[tuple[tuple[str, int], int]], expected: int
) -> None:
    assert work_ahead(tokens, ME, waiting, {"third": 3}, 1 / 8, budget=16) == expected


@pytest.mark.parametrize("seed", range(6))
def test_the_scheduler_does_as_was_forecast(seed: int) -> None:
    scheduler, draw = Scheduler(StepLimits(BUDGET, 1000, chunked=False)), random.Random(seed)
    for number in range(40):
        lengths = [draw.randint(1, BUDGET // 5) for _ in range(draw.choice((1, 5, 60)))]
        scheduler.admit(number, texts(number, lengths, 1000 * number))
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
    assert -4 * BUDGET < before - forecast < 10 * BUDGET


def test_who_is_coming_counts_as_waiting() -> None:
    scheduler = Scheduler(StepLimits(BUDGET, 1000, chunked=False))
    scheduler.admit(1, texts(1, [50], 0))
    assert scheduler.work_ahead(60, coming=[(ME, 40), (ME, 5000)]) == 90
    assert scheduler.work_ahead(60, priority=100, coming=[(("", 8), 40)]) == 40 + 50


def test_the_rate_is_that_of_full_steps() -> None:
    rate = ServiceRate(BUDGET)
    rate.observe(49, 1.0)
    rate.observe(BUDGET, 0.0)
    assert rate.tokens_per_second is None, "neither is a measurement"
    assert rate.seconds(10) is None
    rate.observe(50, 0.5)
    assert rate.tokens_per_second == 100
    assert rate.seconds(25) == 0.25
    rate.observe(1, 1000.0)
    assert rate.tokens_per_second == 100
    newer = ServiceRate(BUDGET)
    newer.observe(100, 10.0)
    newer.observe(1000, 10.0)
    assert newer.tokens_per_second == pytest.approx((50 + 1000) / 15), "newer steps count more"


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
    errors.observe(100, 1.0, 1000.0, 10.0)
    errors.observe(10, 50.0, -1.0, 0.0)
    assert (errors.factor(100, 10.0), errors.factor(10, 0.0)) == (4.0, 1.0), "from one to four times"
    assert errors.factor(100, 9.0) == 4.0
