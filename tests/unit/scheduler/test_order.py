"""The order of requests by size, arrival, tenant and priority, and how much is run before a new one."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.scheduler import Scheduler, ServiceRate, Step, StepLimits, WaitErrors
from tests.unit.scheduler.scheduled_requests import cached, run_dry, scheduled, texts, tokens_by_request


def scheduler_of(tokens: int) -> Scheduler:
    """One whose oldest request gets next to nothing beyond its turn."""
    return Scheduler(StepLimits(tokens, 10_000, chunked=False), oldest_share=1e-9)


def finishing_order(steps: list[Step]) -> list[int]:
    last, position = dict[int, int](), 0
    for step in steps:
        for chunk in step.chunks:
            last[chunk.sequence.request_id] = position = position + 1
        for batch in step.cached:
            last[batch.request_id] = position = position + 1
    return sorted(last, key=lambda request_id: last[request_id])


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        pytest.param([([1] * 41, []), ([1] * 40, []), ([1] * 39, [])], [2, 0, 1], id="class, then arrival"),
        pytest.param([([1] * 5, []), ([4], []), ([1], [])], [1, 2, 0], id="less than half a step"),
        # Cached batches count at their price.
        pytest.param([([], [9, 9, 9]), ([10], [])], [1, 0], id="cached and dearer"),
        pytest.param([([], [9]), ([10], [])], [0, 1], id="cached and cheaper"),
        pytest.param([([1], [9, 9]), ([10, 6], [])], [0, 1], id="both"),
    ],
)
def test_requests_finish_by_size(requests: list[tuple[list[int], list[int]]], expected: list[int]) -> None:
    """Requests of texts and cached batches; before them comes one that takes the part of the oldest."""
    scheduler = scheduler_of(10)
    scheduler.admit(-1, texts(-1, [10] * 1000))
    for request_id, (lengths, prices) in enumerate(requests):
        scheduler.admit(request_id, texts(request_id, lengths), [cached(request_id, p) for p in prices])
    assert finishing_order(run_dry(scheduler))[: len(expected)] == expected


def test_waiting_tokens_of_a_tenant_are_counted() -> None:
    scheduler = scheduler_of(10)
    scheduler.admit(0, texts(0, [10] * 20), tenant="a")
    scheduler.admit(1, texts(1, [10] * 5), [cached(1, 7)], priority=3, tenant="a")
    scheduler.admit(2, texts(2, [10] * 9), tenant="b")
    assert [scheduler.waiting_of(tenant) for tenant in ("a", "b", "")] == [257, 90, 0]
    scheduler.schedule()
    assert scheduler.waiting_of("a") + scheduler.waiting_of("b") == scheduler.waiting_tokens


def given_to(scheduler: Scheduler, steps: int) -> dict[int, int]:
    given: dict[int, int] = {}
    for _ in range(steps):
        for request_id, tokens in tokens_by_request(scheduler.schedule()).items():
            given[request_id] = given.get(request_id, 0) + tokens
    return given


def test_weights_hold_for_what_waits_if_they_mean_something() -> None:
    scheduler = Scheduler(StepLimits(100, 100, chunked=False), weights={"a": 3.0}, oldest_share=0.01)
    for request_id, tenant in enumerate("ab"):
        scheduler.admit(request_id, texts(request_id, [10] * 5000), tenant=tenant)
    assert given_to(scheduler, 40) == pytest.approx({0: 3000, 1: 1000}, rel=0.05)
    scheduler.set_weights({"b": 4.0})
    assert given_to(scheduler, 40) == pytest.approx({0: 800, 1: 3200}, rel=0.05)
    scheduler.set_weights({})
    assert given_to(scheduler, 40) == pytest.approx({0: 2000, 1: 2000}, rel=0.05)
    scheduler.set_weights({"a": 3.0})
    with pytest.raises(ValueError, match="positive and finite"):
        scheduler.set_weights({"a": 1.0, "b": 0.0})
    assert given_to(scheduler, 40) == pytest.approx({0: 3000, 1: 1000}, rel=0.05), "as before"
    limits = StepLimits(100, 100, chunked=False)
    for weight in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"^the weight of tenant 'a' must be positive and finite"):
            Scheduler(limits, weights={"a": weight})
    for share in (0.0, -0.1, 0.51):
        with pytest.raises(ValueError, match=r"^oldest_share must be above 0 and at most 0\.5"):
            Scheduler(limits, oldest_share=share)


@pytest.mark.parametrize("is_back", [False, True])
def test_who_is_ahead_when_weights_change_stays_so_by_tokens(is_back: bool) -> None:
    """Beside a large weight, a hundredth is given four steps as the oldest, and then weighs as much as the
    other: four steps of the other's are what it waits for, not four hundred."""
    scheduler = Scheduler(StepLimits(100, 100, chunked=False), weights={"a": 0.01}, oldest_share=0.5)
    scheduler.admit(0, texts(0, [10] * (20 if is_back else 5000)), tenant="a")
    scheduler.admit(1, texts(1, [10] * 5000), tenant="b")
    given_to(scheduler, 4)
    scheduler.set_weights({})
    if is_back:
        scheduler.admit(2, texts(2, [10] * 5000), tenant="a")
    scheduler.oldest_share = 0.01
    given = given_to(scheduler, 60)
    assert sum(given.get(request_id, 0) for request_id in (0, 2)) > 2500


@settings(max_examples=40)
@given(st.data(), st.booleans())
def test_every_request_finishes_within_the_bound(data: st.DataObject, chunked: bool) -> None:
    budget, share = 40, data.draw(st.sampled_from([1 / 8, 1 / 4, 1 / 2]))
    scheduler = Scheduler(StepLimits(budget, 10_000, chunked), oldest_share=share)
    longest = 3 * budget if chunked else budget
    lengths = st.lists(st.integers(1, longest), min_size=1, max_size=8)
    for request_id in range(data.draw(st.integers(0, 4))):
        scheduler.admit(request_id, texts(request_id, data.draw(lengths)), tenant=str(request_id % 2))
    for _ in range(data.draw(st.integers(0, 3))):
        scheduler.schedule()
    own = data.draw(lengths)
    prices = data.draw(st.lists(st.integers(1, 2 * budget), max_size=2))
    scheduler.admit(10, texts(10, own), [cached(10, price) for price in prices], 5, "last")
    ahead = scheduler.waiting_tokens
    bound = math.ceil((ahead + (share * budget + max(longest, *prices, 0) + longest)) / (share * budget)) + 1
    others = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=4))
    left = sum(own) + sum(prices)
    for step in range(bound):
        scheduler.admit(100 + step, texts(100 + step, others * (budget // sum(others) + 1)))
        left -= tokens_by_request(scheduler.schedule()).get(10, 0)
        if not left:
            return
    pytest.fail(f"{left} tokens are left after {bound} steps")


# Forecasts
BUDGET = 100
ME, OTHER, THIRD = ("", 0), ("other", 0), ("third", 0)


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
        pytest.param(16_383, [(ME, 16_384), *[(ME, 16_383)] * 20], 20 * 16_383 + 16_384, id="what it needs"),
        # The others get two of four tokens; the larger one gets half a token of the rest.
        pytest.param(150, [(ME, 10_000), (OTHER, 10_000)], 200 + 50, id="taken from its own group"),
        pytest.param(100, [(OTHER, 5000)], 100, id="another tenant runs beside"),
        pytest.param(100, [(THIRD, 5000)], 300, id="another tenant of three times the weight"),
        pytest.param(100, [(OTHER, 5000), (THIRD, 20), (ME, 70)], 70 + 170 + 20, id="two tenants"),
        # A third runs beside two thirds where a tenant's only other priority weighs half.
        pytest.param(100, [(("", 1), 5000)], 50, id="a lower priority"),
        pytest.param(100, [(("", -1), 5000)], 200, id="a higher priority"),
        pytest.param(100, [(("other", -3), 5000)], 100, id="no tenant takes from another"),
        pytest.param(100, [(("other", 2), 5000)], 25, id="what can wait lets other tenants pass"),
    ],
)
def test_what_is_run_before(tokens: int, waiting: list[tuple[tuple[str, int], int]], expected: int) -> None:
    scheduler = Scheduler(StepLimits(16, 1000, chunked=False), weights={"third": 3})
    assert scheduler.work_ahead(tokens, *ME, coming=waiting) == expected


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
        step = scheduled(scheduler)
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
    assert (rate.tokens_per_second, rate.seconds(25)) == (100, 0.25)
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
