"""For what share of the time something has work."""

import asyncio
from collections import deque
from collections.abc import Callable

# What is looked at, how often, and over how many looks: ten seconds.
_LOOK_SECONDS, _LOOKS = 0.1, 100


class Busy:
    """For one event loop."""

    def __init__(self) -> None:
        self._looks: deque[bool] = deque(maxlen=_LOOKS)

    async def watch(self, is_busy: Callable[[], bool]) -> None:
        """Looks, for as long as this runs."""
        while True:
            self._looks.append(is_busy())
            await asyncio.sleep(_LOOK_SECONDS)

    def share(self) -> float:
        """From 0 to 1, over the latest seconds."""
        return sum(self._looks) / len(self._looks) if self._looks else 0.0
