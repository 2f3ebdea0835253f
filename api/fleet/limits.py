"""What a tenant's limits are where several engines serve: each engine would count for itself."""

import logging
from collections.abc import Mapping

from maxsimd.api.config import SetupError
from maxsimd.engine.tenants import Tenant

log = logging.getLogger("maxsimd.fleet")

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_queued_tokens", "max_request_tokens")


def check_limits(tenants: Mapping[str, Tenant], replicas: int) -> None:
    """Raises SetupError for limits of tenants that would not hold."""
    limited = [name for name, tenant in tenants.items() if _has_limits(tenant)]
    if replicas > 1 and limited:
        raise SetupError(
            f"the tenant {limited[0]!r} has limits ({', '.join(_LIMITS)}), which hold for one replica only; "
            "leave them out of --api-key-file, or serve with --replicas 1"
        )


def without_limits(tenants: Mapping[str, Tenant], replicas: int) -> dict[str, Tenant]:
    """The tenants with what holds at several engines, their weights and priorities. For a file of keys that
    has changed while the server runs: limits in it are left out, and the log says so."""
    try:
        check_limits(tenants, replicas)
    except SetupError as error:
        log.error("%s; until then there are none", error)
        return {
            name: Tenant(weight=tenant.weight, priority=tenant.priority) for name, tenant in tenants.items()
        }
    return dict(tenants)


def _has_limits(tenant: Tenant) -> bool:
    return any(getattr(tenant, name) is not None for name in _LIMITS)
