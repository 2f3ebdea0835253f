"""What an operator says of a tenant. Data only."""

from dataclasses import dataclass, fields

from maxsimd.engine.requests import PriorityClass, priority_number

LEAST_WEIGHT, LARGEST_WEIGHT = 0.001, 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """What a tenant may use; None is no limit. Raises ValueError for what cannot be.

    `weight` is its share beside other tenants that have work. `priority` is the one that its requests have
    by default, and the best that they may ask for. In a minute it may send `requests_per_minute` and use
    `tokens_per_minute`: a minute's worth can come at once, and fills up again steadily. `max_queued_tokens`
    is what it may have waiting, and `max_request_tokens` the most of one request. Tokens are those that are
    run; cached documents count at their price."""

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

    @property
    def best_priority(self) -> int | None:
        """The lowest number that its requests may have; None where they may have any."""
        return None if self.priority == "interactive" else priority_number(self.priority)
