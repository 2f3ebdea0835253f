"""The router of Ray Serve that says who the replicas are. Serve copies this file's text to every process with
a handle, proxies too: it imports nothing of ours that loads more."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

Published: TypeAlias = Sequence[Mapping[str, Any]]
Changed = Callable[[Published], None]
# An application's name and a deployment's.
Deployment: TypeAlias = tuple[str, str]


class Watchers:
    """Calls functions with what replicas of a deployment have published. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[Deployment, Published] = {}
        self._changed: dict[Deployment, list[Changed]] = {}

    def publish(self, deployment: Deployment, published: Published) -> None:
        """Takes what all replicas have published by now."""
        with self._lock:
            self._published[deployment] = published
            changed = [*self._changed.get(deployment, ())]
        for call in changed:
            call(published)

    def add(self, deployment: Deployment, changed: Changed) -> None:
        """Calls `changed` now and on each change, from any thread."""
        with self._lock:
            self._changed.setdefault(deployment, []).append(changed)
            published = self._published.get(deployment)
        if published is not None:
            changed(published)


watchers = Watchers()


class MembersRouter(PowerOfTwoChoicesRequestRouter):
    """Chooses as Serve's own router does."""

    def update_replicas(self, replicas: Sequence[Any]) -> None:
        """Called when the replicas, or what they have published, change."""
        # The module of this process: this class may come from a copy of its text.
        from maxsimd.api.cluster.router import watchers

        super().update_replicas(replicas)
        deployment = self._deployment_id
        published = [{**replica.replica_metadata, **replica.routing_stats} for replica in replicas]
        watchers.publish((deployment.app_name, deployment.name), published)
