"""Notices a device that is stuck. Lives on the caller's event loop, beside `SchedulerActor`."""

import asyncio
import math
from collections.abc import Callable

from maxsimd.engine.actors.scheduler import SchedulerActor
from maxsimd.engine.actors.turns import Turn

_TICK_SECONDS = 1.0
# No step takes this many times as long as the latest ones let expect.
_BEYOND_EXPECTED = 20
# Before the first step is done nothing is known of the speed, and kernels may have to be compiled.
_BEYOND_TIMEOUT_AT_FIRST = 10


class StuckDeviceError(Exception):
    """The steps on the device have made no progress for far longer than steps take."""


class Watchdog:
    """Raises StuckDeviceError once the device has steps and was not heard of for `timeout` seconds, and for
    many times as long as they should take; never where `timeout` is 0.

    It counts its own ticks, each for what it was to take and never for more: time in which this event loop
    did not run (the machine slept, the process was stopped, others had the processor) proves nothing of the
    device, nor does time in which another model has its turn there: its own watchdog looks at it. `stacks`
    describes where threads stand, for the error."""

    def __init__(
        self,
        timeout: float,
        scheduler: SchedulerActor,
        stacks: Callable[[], str],
        turn: Turn | None = None,
    ) -> None:
        self._timeout = timeout
        self._scheduler = scheduler
        self._stacks = stacks
        self._turn = turn
        self._num_signs = 0
        self._seconds = 0.0

    @property
    def allowance(self) -> float:
        """For how many seconds the steps that are on the device may make no progress."""
        if self._timeout == 0:
            return math.inf
        expected = self._scheduler.step_times.most_seconds(self._scheduler.running_work)
        if expected is None:
            return _BEYOND_TIMEOUT_AT_FIRST * self._timeout
        return max(self._timeout, _BEYOND_EXPECTED * expected)

    async def run(self) -> None:
        """Watches until cancelled, or until the device is stuck."""
        seconds = min(_TICK_SECONDS, self._timeout / 10)
        while seconds:
            await asyncio.sleep(seconds)
            self.tick(seconds)

    def tick(self, seconds: float) -> None:
        """Looks at the device once more, so much later."""
        if self._scheduler.in_flight == 0 or self._scheduler.num_signs != self._num_signs:
            self._num_signs, self._seconds = self._scheduler.num_signs, 0.0
            return
        if self._turn is not None and self._turn.is_anothers:
            self._seconds = 0.0
            return
        self._seconds += seconds
        if self._seconds >= self.allowance:
            stuck = StuckDeviceError(f"a step has made no progress for {self._seconds:.0f} seconds")
            stuck.add_note(self._stacks())
            raise stuck
