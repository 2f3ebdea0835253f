"""How many bytes of bodies are in memory: each is held from its first chunk until its request is answered."""

from collections.abc import Iterator
from contextlib import contextmanager

from maxsimd.api.failures import too_many_bodies


class HeldBytes:
    """What one request holds of a `BodyBudget`."""

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self.bytes = 0

    def add(self, count: int) -> None:
        """Holds `count` bytes more. Raises ApiError (429) where others hold too much; alone a body may be
        as large as bodies may be."""
        if self._budget.bytes > self.bytes and self._budget.bytes + count > self._budget.most:
            raise too_many_bodies()
        self.bytes += count
        self._budget.bytes += count


class BodyBudget:
    """The bytes that all requests together hold, at most `most` while there are several."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0

    @contextmanager
    def hold(self) -> Iterator[HeldBytes]:
        """For one request, until it is answered."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.bytes -= held.bytes
