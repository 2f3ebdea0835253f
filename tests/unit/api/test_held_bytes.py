"""How much of requests' bodies is in memory at a time."""

import pytest

from maxsimd.api.failures import ApiError
from maxsimd.api.held_bytes import BodyBudget


def test_bodies_together_hold_at_most_the_budget() -> None:
    budget = BodyBudget(100)
    with budget.hold() as one, budget.hold() as two:
        one.add(60)
        two.add(40)
        with pytest.raises(ApiError) as refused:
            two.add(1)
        assert (refused.value.status, refused.value.kind) == (429, "QueueFullError")
        assert refused.value.retry_after == 1
        assert budget.bytes == 100
    assert budget.bytes == 0


def test_a_body_alone_may_be_larger() -> None:
    budget = BodyBudget(100)
    with budget.hold() as one, budget.hold() as two:
        one.add(101)
        one.add(1)
        with pytest.raises(ApiError):
            two.add(1)
    with budget.hold() as two:
        two.add(1)
        assert budget.bytes == 1


def test_what_a_failed_request_held_is_free_again() -> None:
    budget = BodyBudget(100)
    with pytest.raises(KeyError), budget.hold() as one:  # noqa: PT012 (both are needed)
        one.add(60)
        raise KeyError
    assert budget.bytes == 0
