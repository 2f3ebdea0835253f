"""Tenants: their limits, their usage and their metrics."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

from maxsimd.engine.errors import QueueFullError, Refusal
from maxsimd.engine.requests import PriorityClass, RunOptions, priority_number

# Shorter waits are ignored; this also covers rounding of times that were waited exactly.
_SHORTEST_WAIT = 0.001


class Bucket:
    """A rate per minute as a token bucket without a clock. It starts full, with a minute's worth.

    Charges beyond its level make debt, which is refilled first. So over any time no more is charged than the
    rate allows, plus a minute's worth and one charge."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._seen = now

    def seconds_until(self, amount: float, now: float) -> float:
        """The seconds until the bucket holds an amount or is full; 0 if it does."""
        missing = min(amount, self.per_minute) - self._filled(now)
        seconds = missing * 60 / self.per_minute
        return seconds if seconds >= _SHORTEST_WAIT else 0.0

    def charge(self, amount: float, now: float) -> None:
        """Takes an amount out; a negative one is put back."""
        self._level = min(self._filled(now) - amount, self.per_minute)
        self._seen = max(now, self._seen)

    def change_rate(self, per_minute: int, now: float) -> None:
        self.charge(0, now)
        self.per_minute = per_minute

    def _filled(self, now: float) -> float:
        filled = self._level + max(0.0, now - self._seen) * self.per_minute / 60
        return min(filled, self.per_minute)


LEAST_WEIGHT, LARGEST_WEIGHT = 0.001, 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The limits of a tenant; None is no limit. Raises ValueError for invalid ones.

    `weight` is its share beside other tenants that have work. `priority` is its requests' default and best
    priority. `requests_per_minute` and `tokens_per_minute` may be used up at once, and refill steadily.
    `max_queued_tokens` limits its waiting tokens, `max_request_tokens` those of one request. Tokens are those
    that run; cached documents count at their price."""

    weight: float = 1.0
    priority: PriorityClass = "interactive"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_queued_tokens: int | None = None
    max_request_tokens: int | None = None

    def __post_init__(self) -> None:
        if not LEAST_WEIGHT <= self.weight <= LARGEST_WEIGHT:
            raise ValueError(f"weight must be from {LEAST_WEIGHT:g} to {LARGEST_WEIGHT:g}")
        if self.priority not in ("interactive", "batch"):
            raise ValueError("priority must be interactive or batch")
        for field in fields(self):
            value = getattr(self, field.name)
            if "_" in field.name and value is not None and value < 1:
                raise ValueError(f"{field.name} must be at least 1")


_ANY_TENANT = Tenant()
Rate = Literal["requests_per_minute", "tokens_per_minute"]


class TenantLimits:
    """The limits and the usage of all tenants. Owned by `Engine`, on the caller's event loop, also over
    restarts. Unnamed tenants have a weight of 1 and no limits of their own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}
        # By tenant and rate.
        self._buckets: dict[tuple[str, str], Bucket] = {}

    @property
    def weights(self) -> dict[str, float]:
        return {name: tenant.weight for name, tenant in self._tenants.items()}

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants.get(name, _ANY_TENANT)

    def set(self, tenants: Mapping[str, Tenant]) -> None:
        """Replaces all tenants. The used part of a rate stays used."""
        self._tenants = dict(tenants)
        now, before, self._buckets = self._clock(), self._buckets, {}
        for name, tenant in tenants.items():
            for rate in get_args(Rate):
                if (per_minute := getattr(tenant, rate)) is not None:
                    bucket = before.get((name, rate)) or Bucket(per_minute, now)
                    bucket.change_rate(per_minute, now)
                    self._buckets[name, rate] = bucket

    def applied(self, options: RunOptions) -> RunOptions:
        """A request's options with a priority that its tenant may have. Raises InvalidRequestError."""
        number, tenant = priority_number(options.priority), self[options.tenant]
        if tenant.priority != "interactive":  # those may have any
            number = max(priority_number(tenant.priority), number)
        return options if number == options.priority else replace(options, priority=number)

    def request_refusal(self, name: str) -> QueueFullError | None:
        """The error for a tenant that may send no request now."""
        return self._refusal(name, "requests_per_minute") or self.token_refusal(name)

    def token_refusal(self, name: str) -> QueueFullError | None:
        """The error for a tenant that may use no tokens now. A request may exceed the rate once, as debt."""
        return self._refusal(name, "tokens_per_minute")

    def charge(self, name: str, rate: Rate, number: int) -> None:
        """Counts requests or tokens in the tenant's rate; a negative number undoes it."""
        if (bucket := self._buckets.get((name, rate))) is not None:
            bucket.charge(number, self._clock())

    def _refusal(self, name: str, rate: Rate) -> QueueFullError | None:
        bucket = self._buckets.get((name, rate))
        seconds = 0.0 if bucket is None else bucket.seconds_until(1, self._clock())
        if bucket is None or not seconds:
            return None
        what = rate.partition("_")[0]
        return QueueFullError(
            f"the tenant {name!r} has used its {bucket.per_minute} {what} per minute; try again "
            f"in {seconds:.1f} seconds, send less, or have its {rate} raised",
            retry_after=seconds,
            reason="rate",
        )


# The label of unnamed tenants, and of those beyond `MOST_LABELS`.
OTHER = "other"
MOST_LABELS = 100
REASONS = (*get_args(Refusal), "size")


class TenantMetrics:
    """Requests and tokens by tenant. Labels are the first hundred names that the engine was given, so that
    clients cannot add labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._labels: frozenset[str] = frozenset()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"maxsimd_tenant_{name}", help, ("tenant", *labels), registry=registry)

        self._requests = counter(
            "requests", "Requests that came, those that were refused included, by tenant"
        )
        self._tokens = counter("tokens", "Tokens of steps, cached documents at their price, by tenant")
        self._refused = counter(
            "refused_requests",
            "Requests refused, for the reasons of maxsimd_refused_requests, by tenant",
            "reason",
        )
        # Looking a counter up takes longer than counting.
        self._requests_of = lru_cache(MOST_LABELS + 1)(self._requests.labels)
        self._refused_of = lru_cache(None)(self._refused.labels)

    def set_names(self, names: Iterable[str]) -> None:
        """Replaces the labels. Counts of removed tenants are no longer shown."""
        labels = frozenset([name for name in names if name not in ("", OTHER)][:MOST_LABELS])
        for gone in self._labels - labels:
            self._requests.remove(gone)
            self._tokens.remove(gone)
            for reason in REASONS:
                self._refused.remove(gone, reason)
        self._requests_of.cache_clear()
        self._refused_of.cache_clear()
        self._labels = labels

    def count_request(self, tenant: str) -> None:
        self._requests_of(self._label(tenant)).inc()

    def count_tokens(self, tenant: str, tokens: int) -> None:
        self._tokens.labels(self._label(tenant)).inc(tokens)

    def count_refusal(self, tenant: str, reason: str) -> None:
        self._refused_of(self._label(tenant), reason).inc()

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self._labels else OTHER
