"""What the replicas of deployments have published, and who in this process is called with it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Published: TypeAlias = Sequence[Mapping[str, Any]]
Changed = Callable[[Published], None]
# An application's name and a deployment's.
Deployment: TypeAlias = tuple[str, str]


class Watchers:
    """For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[Deployment, Published] = {}
        self._changed: dict[Deployment, list[Changed]] = {}

    def publish(self, deployment: Deployment, published: Published) -> None:
        """Takes what all replicas of a deployment have published by now."""
        with self._lock:
            self._published[deployment] = published
            changed = [*self._changed.get(deployment, ())]
        for call in changed:
            call(published)

    def add(self, deployment: Deployment, changed: Changed) -> None:
        """Has a function called with it, now and whenever it changes, from any thread."""
        with self._lock:
            self._changed.setdefault(deployment, []).append(changed)
            published = self._published.get(deployment)
        if published is not None:
            changed(published)


watchers = Watchers()
