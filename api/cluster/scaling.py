"""Number, slots and load of scorers, without Ray. Serve's controller imports this, so it loads no torch."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from maxsimd.scheduler.fleet.members import agreed_slots, free_slot

if TYPE_CHECKING:
    from maxsimd.api.fleet.link import Address
    from maxsimd.api.fleet.roster import Listed

# Busier scorers leave too little room for random arrivals.
_BUSY = 0.7


class QueuedTokensPolicy:
    """The number of scorers that finish the queue within `wanted_seconds` at their measured speed, and that
    are each busy for at most seven tenths of the time. Serve applies bounds and delays."""

    def __init__(self, wanted_seconds: float = 2.0) -> None:
        self._wanted_seconds = wanted_seconds

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """From Serve's AutoscalingContext to the number of replicas, and no state."""
        queued, rates, busy = (
            [float(value) for value in context.aggregated_metrics.get(name, {}).values()]
            for name in ("queued_tokens", "tokens_per_second", "busy")
        )
        if not queued:  # nothing has been heard yet
            return context.target_num_replicas, {}
        measured = [rate for rate in rates if rate > 0]
        by_queue = 0.0
        if measured:
            by_queue = sum(queued) / (sum(measured) / len(measured) * self._wanted_seconds)
        return max(1, math.ceil(by_queue), math.ceil(sum(busy) / _BUSY)), {}


log = logging.getLogger("maxsimd.cluster")


class OwnSlot:
    """A scorer's slot, which decides the documents that it caches. Ray renumbers replicas when one leaves;
    the slot stays."""

    def __init__(self) -> None:
        self._listed: Sequence[Listed] = ()
        self._address: Address | None = None
        self.number = -1  # until `choose`

    def choose(self, rank: int, address: "Address") -> None:
        """Takes the rank as slot, or the lowest free one where another scorer has it."""
        self._address = address
        self.number = free_slot(rank, [each.slot for each in self._listed])

    def set_listed(self, listed: "Sequence[Listed]") -> None:
        """Takes the scorers that are there now; their news of this one may be old."""
        self._listed = listed
        if self._address is None:
            return
        own = repr(self._address)
        number = agreed_slots({repr(each.address): each.slot for each in listed} | {own: self.number})[own]
        if number != self.number:
            log.info("scorer %d is scorer %d from now on", self.number, number)
            self.number = number


# Seconds between samples, and samples kept.
_LOOK_SECONDS, _LOOKS = 0.1, 100


class Busy:
    """Samples whether there is work, over the last ten seconds. For one event loop."""

    def __init__(self) -> None:
        self._looks: deque[bool] = deque(maxlen=_LOOKS)

    async def watch(self, is_busy: Callable[[], bool]) -> None:
        while True:
            self._looks.append(is_busy())
            await asyncio.sleep(_LOOK_SECONDS)

    def share(self) -> float:
        """The share of time with work, from 0 to 1."""
        return sum(self._looks) / len(self._looks) if self._looks else 0.0
