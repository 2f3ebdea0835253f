"""What each tenant may use and has used. When a request is asked about is decided in `admission`."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from maxsimd.engine.errors import QueueFullError
from maxsimd.engine.requests import RunOptions, priority_number
from maxsimd.engine.tenants.bucket import Bucket
from maxsimd.engine.tenants.tenant import Tenant

_ANY_TENANT = Tenant()
_RATES = ("requests_per_minute", "tokens_per_minute")


class TenantLimits:
    """Owned by `Engine`, on the caller's event loop; stays when the engine is started anew. A tenant that is
    not named has a weight of 1 and no limits of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}
        # By tenant and the name of its limit.
        self._buckets: dict[tuple[str, str], Bucket] = {}

    @property
    def weights(self) -> dict[str, float]:
        return {name: tenant.weight for name, tenant in self._tenants.items()}

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants.get(name, _ANY_TENANT)

    def set(self, tenants: Mapping[str, Tenant]) -> None:
        """Names all tenants anew. What one has used of a rate that stays, or changes, stays used."""
        self._tenants = dict(tenants)
        now, before, self._buckets = self._clock(), self._buckets, {}
        for name, tenant in tenants.items():
            for rate in _RATES:
                per_minute = getattr(tenant, rate)
                if per_minute is None:
                    continue
                bucket = before.get((name, rate)) or Bucket(per_minute, now)
                bucket.change_rate(per_minute, now)
                self._buckets[name, rate] = bucket

    def applied(self, options: RunOptions) -> RunOptions:
        """A request's options, with a priority that its tenant may have. Raises InvalidRequestError for a
        priority that there is not."""
        number, best = priority_number(options.priority), self[options.tenant].best_priority
        if best is not None:
            number = max(best, number)
        return options if number == options.priority else replace(options, priority=number)

    def request_refusal(self, name: str) -> QueueFullError | None:
        """Why a tenant may send no request now."""
        return self._refusal(name, "requests_per_minute") or self.token_refusal(name)

    def token_refusal(self, name: str) -> QueueFullError | None:
        """Why a tenant may use no tokens now: it has used up its rate. What a request has beyond makes debt,
        so that none is too large to come in once."""
        return self._refusal(name, "tokens_per_minute")

    def charge_requests(self, name: str, number: int) -> None:
        """Counts requests in the tenant's rate; a negative number takes them back."""
        self._charge(name, "requests_per_minute", number)

    def charge_tokens(self, name: str, number: int) -> None:
        self._charge(name, "tokens_per_minute", number)

    def _charge(self, name: str, rate: str, number: int) -> None:
        if (bucket := self._buckets.get((name, rate))) is not None:
            bucket.charge(number, self._clock())

    def _refusal(self, name: str, rate: str) -> QueueFullError | None:
        bucket = self._buckets.get((name, rate))
        seconds = 0.0 if bucket is None else bucket.seconds_until(1, self._clock())
        if bucket is None or not seconds:
            return None
        what = rate.partition("_")[0]
        return QueueFullError(
            f"the tenant {name!r} has used up the {bucket.per_minute} {what} that it has a minute; try again "
            f"in {seconds:.1f} seconds, send less, or have its {rate} raised",
            retry_after=seconds,
            reason="rate",
        )
