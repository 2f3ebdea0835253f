"""Small requests: whether one is, and whether more of them are to be expected."""

from maxsimd.scheduler.waiting import WaitingRequest

# For how many steps after the last small request the next is expected: for seconds, on a CPU.
STEPS_BESIDE_SMALL = 256


class SmallRequests:
    """A request is small while `most` tokens or fewer of it wait; none is where `most` is None."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._steps_left = 0

    def include(self, request: WaitingRequest) -> bool:
        return self._most is not None and request.work <= self._most

    def note(self, request: WaitingRequest) -> None:
        """Notes that something of a request has come: after a small one, more are expected for a while."""
        if self.include(request):
            self._steps_left = STEPS_BESIDE_SMALL

    def next_step(self, budget: int) -> int:
        """How much of the next step's budget larger requests may use."""
        if self._most is None or not self._steps_left:
            return budget
        self._steps_left -= 1
        return min(budget, self._most)
