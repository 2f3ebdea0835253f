"""The router of Ray Serve that says who the replicas are. Serve copies this file's text to every process with
a handle, proxies too: it imports nothing of ours that loads more."""

from collections.abc import Sequence
from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter


class MembersRouter(PowerOfTwoChoicesRequestRouter):
    """Chooses as Serve's own router does."""

    def update_replicas(self, replicas: Sequence[Any]) -> None:
        """Called with all replicas, whenever they change or what they have published does."""
        from maxsimd.api.cluster.watchers import watchers

        super().update_replicas(replicas)
        deployment = self._deployment_id
        published = [{**replica.replica_metadata, **replica.routing_stats} for replica in replicas]
        watchers.publish((deployment.app_name, deployment.name), published)
