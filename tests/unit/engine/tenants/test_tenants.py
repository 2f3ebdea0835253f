"""Tenants: what may be said of one, rates a minute, and what is counted of each."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from maxsimd.engine import InvalidRequestError, Tenant
from maxsimd.engine.requests import RunOptions, priority_number
from maxsimd.engine.tenants import MOST_LABELS, Bucket, TenantLimits, TenantMetrics
from tests.waiting import Clock

RATES = st.integers(1, 10_000_000)
AMOUNTS = st.integers(0, 30_000_000)
# Seconds from one request to the next, and the tokens of each.
TRAFFIC = st.lists(st.tuples(st.floats(0, 200), AMOUNTS), max_size=60)
Traffic = list[tuple[float, int]]


def _let_in(bucket: Bucket, traffic: Traffic) -> Traffic:
    """When what was let in, of requests that come whenever they like and may come in while any is left."""
    now, let_in = 0.0, []
    for pause, amount in traffic:
        now += pause
        if not bucket.seconds_until(1, now):
            bucket.charge(amount, now)
            let_in.append((now, amount))
    return let_in


@settings(max_examples=60)
@given(RATES, TRAFFIC, st.integers(1, 10_000_000))
def test_no_more_than_the_rate_comes_in_and_who_waits_does(rate: int, traffic: Traffic, amount: int) -> None:
    bucket = Bucket(rate, 0.0)
    let_in = _let_in(bucket, traffic)
    for i in range(len(let_in)):
        for j in range(i, len(let_in)):
            before_the_last = sum(amount for _, amount in let_in[i:j])
            seconds = let_in[j][0] - let_in[i][0]
            # Requests that would wait for less than a millisecond do not wait.
            assert before_the_last <= rate * (1 + (seconds + 0.002) / 60) * (1 + 1e-9)
    now = sum(pause for pause, _ in traffic)
    seconds = bucket.seconds_until(amount, now)
    assert bucket.seconds_until(amount, now + seconds) == 0
    if seconds > 0.01:
        assert bucket.seconds_until(amount, now + 0.9 * seconds) > 0, "it was no longer than it had to be"


@settings(max_examples=60)
@given(RATES, st.integers(0, 1000))
def test_a_minutes_worth_may_come_at_once_and_no_more(rate: int, minutes: int) -> None:
    bucket, now = Bucket(rate, 0.0), 60.0 * minutes
    bucket.charge(rate, now)
    next_one = 60 / rate
    assert bucket.seconds_until(1, now) == pytest.approx(next_one if next_one >= 0.001 else 0)
    assert bucket.seconds_until(rate, now) == pytest.approx(60)


@settings(max_examples=60)
@given(RATES, st.lists(st.tuples(AMOUNTS, st.floats(0, 100))))
def test_what_is_put_back_was_never_taken(rate: int, charges: list[tuple[int, float]]) -> None:
    bucket, untouched = Bucket(rate, 0.0), Bucket(rate, 0.0)
    for each in (bucket, untouched):
        each.charge(2 * rate, 0.0)
    for amount, _ in charges:
        bucket.charge(amount, 10.0)
        bucket.charge(-amount, 10.0)
    assert bucket.seconds_until(rate, 20.0) == pytest.approx(untouched.seconds_until(rate, 20.0), abs=1e-3)


@settings(max_examples=60)
@given(RATES, RATES, AMOUNTS)
def test_what_was_used_stays_used_when_the_rate_changes(before: int, after: int, used: int) -> None:
    bucket = Bucket(before, 0.0)
    bucket.charge(used, 0.0)
    bucket.change_rate(after, 0.0)
    left = min(before - used, after)
    assert bucket.seconds_until(after, 0.0) == pytest.approx((after - left) * 60 / after, abs=0.001)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.charge(60, 100.0)
    bucket.charge(0, 40.0)
    assert bucket.seconds_until(1, 100.0) == 1.0


def test_what_cannot_be_said_of_a_tenant_is_refused() -> None:
    for wrong, message in (
        *(({"weight": weight}, "weight must be from 0.001 to 1000") for weight in (0.0, 1000.1, math.nan)),
        ({"priority": "urgent"}, "priority must be interactive or batch"),
        ({"requests_per_minute": 0}, "requests_per_minute must be at least 1"),
        ({"tokens_per_minute": -5}, "tokens_per_minute must be at least 1"),
        ({"max_queued_tokens": 0}, "max_queued_tokens must be at least 1"),
        ({"max_request_tokens": 0}, "max_request_tokens must be at least 1"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            Tenant(**wrong)
    Tenant(weight=0.001, requests_per_minute=1, tokens_per_minute=1, max_queued_tokens=1)


def test_batches_let_others_pass() -> None:
    assert (priority_number("interactive"), priority_number("batch"), priority_number(-3)) == (0, 4, -3)
    assert (RunOptions("batch", "a").share, RunOptions(99, "a").share) == (("a", 4), ("a", 8))
    with pytest.raises(InvalidRequestError, match="use interactive, batch or a number"):
        priority_number("urgent")  # type: ignore[arg-type]
    limits = TenantLimits()
    limits.set({"nightly": Tenant(priority="batch"), "search": Tenant()})
    cases: Any = ((0, 4, 0), ("interactive", 4, 0), (-8, 4, -8), ("batch", 4, 4), (4, 4, 4), (6, 6, 6))
    for asked, batch, interactive in cases:
        for tenant, expected in (("nightly", batch), ("search", interactive), ("", interactive)):
            applied = limits.applied(RunOptions(asked, tenant, timeout=3.0))
            assert applied == RunOptions(expected, tenant, timeout=3.0)


def test_a_rate_that_is_changed_goes_on_and_a_new_one_begins() -> None:
    limits = TenantLimits(clock := Clock())
    limits.set({"a": Tenant(requests_per_minute=60), "b": Tenant(requests_per_minute=60)})
    for name in ("a", "b"):
        limits.charge(name, "requests_per_minute", 60)
    limits.set({"a": Tenant(requests_per_minute=120, weight=3), "c": Tenant(requests_per_minute=60)})
    refusal = limits.request_refusal("a")
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == ("rate", 0.5)
    assert limits.request_refusal("b") is None, "it has no limits any more"
    assert (limits.request_refusal("c"), limits.weights) == (None, {"a": 3, "c": 1})
    limits.set({"b": Tenant(requests_per_minute=60)})
    assert limits.request_refusal("b") is None
    clock.now = 0.5
    limits.set({"a": Tenant(requests_per_minute=120)})
    assert limits.request_refusal("a") is None


def _shown(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"maxsimd_tenant_{name}_total", labels)


def test_tenants_are_labels_while_they_are_named() -> None:
    metrics = TenantMetrics(registry := CollectorRegistry())
    metrics.set_names(["", "other", *(f"t{i}" for i in range(MOST_LABELS + 5))])
    for tenant in ("t0", "t99", "t100", "t104", "", "other", "unheard of"):
        metrics.count_request(tenant)
        metrics.count_tokens(tenant, 10)
        metrics.count_refusal(tenant, "rate")
    for tenant, number in (("t0", 1), ("t99", 1), ("t100", None), ("", None), ("other", 5)):
        assert _shown(registry, "requests", tenant=tenant) == number
        assert _shown(registry, "tokens", tenant=tenant) == (number and 10 * number)
        assert _shown(registry, "refused_requests", tenant=tenant, reason="rate") == number
    metrics = TenantMetrics(registry := CollectorRegistry())
    metrics.set_names(["a", "b"])
    for tenant in ("a", "b"):
        metrics.count_request(tenant)
        metrics.count_tokens(tenant, 10)
        for reason in ("rate", "queue", "size"):
            metrics.count_refusal(tenant, reason)
    metrics.set_names(["b", "c"])
    assert {sample.labels["tenant"] for family in registry.collect() for sample in family.samples} == {"b"}
    assert _shown(registry, "tokens", tenant="b") == 10, "what stays goes on"
