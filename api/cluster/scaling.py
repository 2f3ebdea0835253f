"""How many scorers there should be. Serve's controller runs this: it imports nothing of ours."""

import math
from typing import Any

# Scorers that work for a larger share of the time leave too little room for requests that come at random.
_BUSY = 0.7


class QueuedTokensPolicy:
    """As many scorers as finish what waits, at the speed that they have shown, within `wanted_seconds`; and
    enough that none needs to work for more than seven tenths of the time. Bounds and delays are Serve's."""

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
