"""What tenants weigh, and how a tenant's weight is divided among its priorities."""

import math
from collections.abc import Mapping

# A tenant and a priority: who shares the device with whom.
Share = tuple[str, int]


def share_of(tenant: str, priority: int) -> Share:
    """Whose share of the device a request uses; priorities are cut to -8 to 8."""
    return tenant, max(-8, min(8, priority))


def checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """A copy of tenants' weights. Raises ValueError for one that means nothing."""
    for tenant, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of tenant {tenant!r} must be positive and finite, not {weight}")
    return dict(weights)


def part_of(priority: int) -> float:
    """What a priority weighs beside the other priorities of its tenant."""
    return 2.0**-priority


def weight_of(tenant_weight: float, priority: int, together: float) -> float:
    """What a priority of a tenant weighs; `together` is the sum of the parts of those that have work.

    No tenant takes from another by its choice of priority: all its priorities together weigh at most as much
    as the tenant. They weigh less where none of them is 0 or below: what can wait lets other tenants pass."""
    return tenant_weight * part_of(priority) / max(1.0, together)
