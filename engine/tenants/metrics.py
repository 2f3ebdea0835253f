"""What is counted by tenant: of those that are named, up to a number of them."""

from collections.abc import Iterable
from functools import lru_cache
from typing import get_args

from prometheus_client import CollectorRegistry, Counter

from maxsimd.engine.errors import Refusal

# The label of every tenant that is not named, or is one too many.
OTHER = "other"
MOST_LABELS = 100
REASONS = (*get_args(Refusal), "size")


class TenantMetrics:
    """Requests and tokens by tenant. No client can make a label: only the names that the engine was given
    are labels, the first hundred of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._labels: frozenset[str] = frozenset()
        self._requests = Counter(
            "maxsimd_tenant_requests",
            "Requests that came, those that were refused included, by tenant",
            ("tenant",),
            registry=registry,
        )
        self._tokens = Counter(
            "maxsimd_tenant_tokens",
            "Tokens of steps, cached documents at their price, by tenant",
            ("tenant",),
            registry=registry,
        )
        self._refused = Counter(
            "maxsimd_tenant_refused_requests",
            "Requests refused, for the reasons of maxsimd_refused_requests, by tenant",
            ("tenant", "reason"),
            registry=registry,
        )
        # To look a counter up takes longer than to count.
        self._requests_of = lru_cache(MOST_LABELS + 1)(self._requests.labels)
        self._refused_of = lru_cache(None)(self._refused.labels)

    def set_names(self, names: Iterable[str]) -> None:
        """Counts these from now on; what was counted of others is no longer shown."""
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
