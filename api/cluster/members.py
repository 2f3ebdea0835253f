"""Who serves, as Ray Serve says it: what is not settled in Ray's interface is in this file and `router.py`.

Each replica publishes where it listens when it is ready (`record_replica_metadata`), and its slot as that
changes (`record_routing_stats`); Serve's controller pushes both to the routers of all processes that have a
handle. Parts of requests do not come by a router: a front connects to the scorers themselves.
"""

from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client as get_global_client
from ray.serve.handle import DeploymentHandle

from maxsimd.api.cluster.watchers import Published, watchers
from maxsimd.api.fleet.address import NetAddress
from maxsimd.api.fleet.roster import Listed

# How often replicas are asked for their slot, in seconds.
_SLOT_SECONDS = 5.0


def router() -> RequestRouterConfig:
    """What deployments are to be configured with whose replicas are watched."""
    return RequestRouterConfig(
        request_router_class="maxsimd.api.cluster.router:MembersRouter",
        request_routing_stats_period_s=_SLOT_SECONDS,
    )


def watch(handle: DeploymentHandle, changed: Callable[[list[Listed]], None]) -> None:
    """Has a function called with all replicas of a deployment, now and whenever they change; from any
    thread."""

    def published(replicas: Published) -> None:
        changed([_listed(each) for each in replicas if "secret" in each])

    deployment = handle.deployment_id
    watchers.add((deployment.app_name, deployment.name), published)
    if not handle.is_initialized:
        handle._init()  # a router begins with the first call otherwise


def _listed(published: Any) -> Listed:
    address = NetAddress(published["host"], int(published["port"]), published["secret"])
    return Listed(int(published["slot"]), address)


def own_handle() -> DeploymentHandle:
    """A handle of the deployment that this replica belongs to."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


def own_rank() -> int:
    """The rank of this replica among its deployment's by now: a number from 0, which whoever replaces it
    takes over. It changes where another one leaves."""
    return int(serve.get_replica_context().rank.rank)


def own_host() -> str:
    """This machine's address, as others in the cluster reach it."""
    return str(ray.util.get_node_ip_address())


def proxy_address() -> tuple[str, int]:
    """Where Serve's proxies listen, which may have been started before with other options."""
    options = get_global_client().http_config
    return str(options.host), int(options.port)


def published(address: NetAddress, slot: int) -> dict[str, Any]:
    """What a replica is to return as its metadata."""
    return {"host": address.host, "port": address.port, "secret": address.secret, "slot": slot}
