"""How many features of pictures are held for sequences that have not been scheduled."""

import sys

from maxsimd.scheduler.waiting import WaitingRequest


class HeldFeatures:
    """The requests with pictures that have been scheduled, and sequences of these that have not. Together
    they hold at most as many features as the `limit`, or those of one sequence."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests: dict[int, WaitingRequest] = {}

    @property
    def number(self) -> int:
        return sum(request.features for request in self._requests.values())

    @property
    def room(self) -> int:
        """How many features the pictures of one more sequence may have: any number where none are held."""
        held = self.number
        return self._limit - held if held else sys.maxsize

    def note(self, request: WaitingRequest) -> None:
        """Notes that a request has a picture in the step that is being formed."""
        self._requests[request.request_id] = request

    def end_step(self) -> None:
        """Lets what waits for a step's pictures into the next one."""
        for request in [*self._requests.values()]:
            request.end_step()
            if not request.features:
                del self._requests[request.request_id]

    def forget(self, request: WaitingRequest) -> None:
        """Forgets a request that no longer waits."""
        self._requests.pop(request.request_id, None)
