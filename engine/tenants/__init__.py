"""Tenants: what each may use of an engine, what it has used, and what is counted of it."""

from maxsimd.engine.tenants.limits import TenantLimits
from maxsimd.engine.tenants.metrics import TenantMetrics
from maxsimd.engine.tenants.tenant import Tenant

__all__ = ["Tenant", "TenantLimits", "TenantMetrics"]
