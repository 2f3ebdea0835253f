"""The order in which waiting requests are served: weighted shares between groups, classes of size within one.

How much of a request fits a step is not decided here.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping

from maxsimd.scheduler.waiting import WaitingRequest
from maxsimd.scheduler.weights import checked_weights, part_of, weight_of

# A group can be ahead of the others by at most what its weight would give it in this number of steps.
_MAX_STEPS_AHEAD = 4


def size_class(tokens: int, budget: int) -> int:
    """The size class of a request with `tokens` left: 0 for those of less than half the `budget` of a step, 1
    for less than a whole step, 2 for less than two, 3 for less than four, and so on. A step runs several of
    the smallest: if some of them passed the others, these would be late and nobody much earlier."""
    return (2 * tokens // max(1, budget)).bit_length()


class _Group:
    """The waiting requests of one tenant and priority, in the order in which they are served.

    `virtual_time` is what they have been given, in tokens divided by their weight."""

    def __init__(self, share: tuple[str, int], number: int, virtual_time: float) -> None:
        self.share = share
        self.number = number
        self.virtual_time = virtual_time
        self.num_requests = 0
        self.ranked: list[tuple[int, int, WaitingRequest]] = []


class Shares:
    """Ranks the waiting requests. Owned by the `Scheduler`, which alone may call it.

    The group that has been given least for its weight is served first: start-time fair queueing (Goyal, Vin &
    Cheng 1996). So shares hold only between groups that have work, and none is saved up without work. A
    tenant's weight is divided among its priorities that have work, 2**-priority to each: no tenant takes from
    another by its choice of `priority`. One that has only priorities above 0 lets others pass: it weighs no
    more than these parts together. Within a group, requests are ranked by the class of what they have left,
    then by arrival: shortest remaining processing time (Schrage 1968), the order with the least mean
    latency, but with classes (`size_class`), so that like requests are served one after the other.

    Every change costs a binary search and an insertion into a list.
    """

    def __init__(self, weights: Mapping[str, float], tokens: int) -> None:
        self.weights = checked_weights(weights)
        self._most_ahead = _MAX_STEPS_AHEAD * tokens
        self._budget = tokens
        self._now = 0.0
        self._numbered = 0
        self._groups: dict[tuple[str, int], _Group] = {}
        self._order: list[tuple[float, int, _Group]] = []
        # What those priorities of a tenant that have work weigh together.
        self._priorities: dict[str, float] = {}
        # The virtual times of groups that ran out of work while they were ahead of the others.
        self._ahead: dict[tuple[str, int], float] = {}
        self._classes: dict[int, int] = {}
        self._aside: dict[int, WaitingRequest] = {}

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes what tenants weigh from now on. What each has been given ahead of the others stays as many
        tokens as it was. Raises ValueError, and changes nothing, for a weight that means nothing."""
        before, self.weights = self.weights, checked_weights(weights)

        def scaled(share: tuple[str, int], virtual_time: float) -> float:
            ratio = before.get(share[0], 1.0) / self.weights.get(share[0], 1.0)
            return self._now + (virtual_time - self._now) * ratio

        for share, group in self._groups.items():
            self._move(group, scaled(share, group.virtual_time))
        self._ahead = {share: scaled(share, time) for share, time in self._ahead.items()}

    def join(self, request: WaitingRequest) -> None:
        """Takes in a request that has work."""
        group = self._groups.get(request.share)
        if group is None:
            self._advance()
            tenant, priority = request.share
            start = max(self._now, self._ahead.pop(request.share, 0.0))
            group = self._groups[request.share] = _Group(request.share, self._numbered, start)
            self._numbered += 1
            self._priorities[tenant] = self._priorities.get(tenant, 0.0) + part_of(priority)
        group.num_requests += 1
        self._rank(group, request)

    def leave(self, request: WaitingRequest) -> None:
        """Forgets a request."""
        group = self._groups[request.share]
        if self._aside.pop(request.request_id, None) is None:
            self._unrank(group, request)
        group.num_requests -= 1
        if group.num_requests:
            return
        del self._groups[request.share]
        tenant, priority = request.share
        self._priorities[tenant] -= part_of(priority)
        if not self._priorities[tenant]:
            del self._priorities[tenant]
        self._ahead[request.share] = group.virtual_time
        if not self._groups:
            self._ahead.clear()
            self._now = 0.0

    def first(self) -> WaitingRequest | None:
        """The request to serve next: the first of its group, in the group that has had least."""
        return self._order[0][2].ranked[0][2] if self._order else None

    def part(self, request: WaitingRequest) -> float:
        """The part of the device that the request's tenant and priority are due by their weight, beside all
        others that have work."""
        together = sum(self._weight(group) for group in self._groups.values())
        return self._weight(self._groups[request.share]) / together

    def charge(self, request: WaitingRequest, tokens: int) -> None:
        """Notes that a request was given tokens, or with 0 that what it has left has changed."""
        group = self._groups[request.share]
        is_ranked = request.request_id not in self._aside
        if is_ranked and self._classes[request.request_id] != self._class_of(request):
            self._unrank(group, request)
            self._rank(group, request)
        weight = self._weight(group)
        later = min(group.virtual_time + tokens / weight, self._now + self._most_ahead / weight)
        if later > group.virtual_time:
            self._move(group, later)

    def set_aside(self, request: WaitingRequest) -> None:
        """Leaves a request out of the order until `restore`: nothing of it fits the step."""
        self._unrank(self._groups[request.share], request)
        self._aside[request.request_id] = request

    def restore(self) -> None:
        """Brings back, at the end of a step, what was set aside."""
        for request in self._aside.values():
            self._rank(self._groups[request.share], request)
        self._aside.clear()
        self._advance()

    def _advance(self) -> None:
        """Moves the present to the group that has been given least; who was ahead of the others until then,
        and has no work, is even with them."""
        if self._order:
            self._now = max(self._now, self._order[0][0])
        if self._ahead:
            self._ahead = {share: time for share, time in self._ahead.items() if time > self._now}

    def _weight(self, group: _Group) -> float:
        tenant, priority = group.share
        return weight_of(self.weights.get(tenant, 1.0), priority, self._priorities[tenant])

    def _class_of(self, request: WaitingRequest) -> int:
        return size_class(request.work, self._budget)

    def _rank(self, group: _Group, request: WaitingRequest) -> None:
        if not group.ranked:
            insort(self._order, (group.virtual_time, group.number, group))
        size_class = self._classes[request.request_id] = self._class_of(request)
        insort(group.ranked, (size_class, request.arrival, request))

    def _unrank(self, group: _Group, request: WaitingRequest) -> None:
        size_class = self._classes.pop(request.request_id)
        del group.ranked[bisect_left(group.ranked, (size_class, request.arrival))]
        if not group.ranked:
            del self._order[bisect_left(self._order, (group.virtual_time, group.number))]

    def _move(self, group: _Group, virtual_time: float) -> None:
        if group.ranked:
            del self._order[bisect_left(self._order, (group.virtual_time, group.number))]
            insort(self._order, (virtual_time, group.number, group))
        group.virtual_time = virtual_time
