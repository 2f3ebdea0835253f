"""By which numbers the engine names a request, its sequences and its results."""

from collections.abc import Iterator
from dataclasses import dataclass

from maxsimd.scheduler import ResultSlot


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The ids of one request. All requests take their sequences' ids from the same `sequence_ids`."""

    request_id: int
    sequence_ids: Iterator[int]

    def next_sequence_id(self) -> int:
        """An id that no other sequence of the engine has."""
        return next(self.sequence_ids)

    def slot(self, index: int) -> ResultSlot:
        """Where result `index` of the request goes."""
        return ResultSlot(self.request_id, index)
