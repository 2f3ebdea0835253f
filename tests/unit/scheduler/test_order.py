"""Which request is served first: classes of size, arrival, the part of the oldest, tenants and priorities."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.scheduler import Scheduler, Step, StepLimits
from tests.unit.scheduler.scheduled_requests import cached, run_dry, texts, tokens_by_request


def scheduler_of(tokens: int) -> Scheduler:
    """One whose oldest request gets next to nothing beyond its turn."""
    return Scheduler(StepLimits(tokens, 10_000, chunked=False), oldest_share=1e-9)


def finishing_order(steps: list[Step]) -> list[int]:
    """Request ids in the order of their last parts."""
    last: dict[int, int] = {}
    position = 0
    for step in steps:
        for chunk in step.chunks:
            last[chunk.sequence.request_id] = position = position + 1
        for batch in step.cached:
            last[batch.request_id] = position = position + 1
    return sorted(last, key=lambda request_id: last[request_id])


def order_of(*requests: tuple[list[int], list[int]]) -> list[int]:
    """The order in which requests of texts and cached batches finish; before them comes one that takes the
    part of the oldest."""
    scheduler = scheduler_of(10)
    scheduler.admit(-1, texts(-1, [10] * 1000))
    for request_id, (lengths, prices) in enumerate(requests):
        scheduler.admit(request_id, texts(request_id, lengths), [cached(request_id, p) for p in prices])
    return [request_id for request_id in finishing_order(run_dry(scheduler)) if request_id >= 0]


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
def test_requests_finish_by_class_of_size(
    requests: list[tuple[list[int], list[int]]], expected: list[int]
) -> None:
    assert order_of(*requests) == expected


def test_work_that_is_added_raises_the_class() -> None:
    scheduler = scheduler_of(10)
    scheduler.admit(-1, texts(-1, [10] * 100))
    scheduler.schedule()
    scheduler.admit(0, texts(0, [10]))
    scheduler.admit(1, texts(1, [10, 10]))
    scheduler.admit(0, texts(0, [10] * 7))
    assert finishing_order(run_dry(scheduler)) == [1, 0, -1]
    # What waits of a tenant is counted.
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


def test_weights_that_change_hold_for_what_waits() -> None:
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


def test_a_weight_or_a_share_that_means_nothing_is_refused() -> None:
    limits = StepLimits(100, 100, chunked=False)
    for weight in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"^the weight of tenant 'a' must be positive and finite"):
            Scheduler(limits, weights={"a": weight})
    for share in (0.0, -0.1, 0.51):
        with pytest.raises(ValueError, match=r"^oldest_share must be above 0 and at most 0\.5"):
            Scheduler(limits, oldest_share=share)


@settings(max_examples=40)
@given(st.data(), st.booleans())
def test_every_request_finishes_within_the_bound(data: st.DataObject, chunked: bool) -> None:
    """Whatever else comes in every step: small requests that pass it, or long sequences that must be cut."""
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
    once = share * budget + max(longest, *prices, 0) + longest
    bound = math.ceil((ahead + once) / (share * budget)) + 1
    others = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=4))
    left = sum(own) + sum(prices)
    for step in range(bound):
        scheduler.admit(100 + step, texts(100 + step, others * (budget // sum(others) + 1)))
        left -= tokens_by_request(scheduler.schedule()).get(10, 0)
        if not left:
            return
    pytest.fail(f"{left} tokens are left after {bound} steps")
