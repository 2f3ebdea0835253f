"""The turns of models on a shared device. Lives on the event loop of its thread."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Self

# The most device time that a model without steps keeps its lead over the others. A busy model may have a
# moment without a request between two steps.
_CREDIT_SECONDS = 0.25
# Rounds of the event loop before a turn is given: a runner's next step, posted by another thread, needs two
# rounds to become a request for a turn.
_ROUNDS = 3


def check_weight(weight: float) -> None:
    """Raises ValueError for an invalid weight."""
    if not 0 < weight < math.inf:
        raise ValueError(f"the weight of a model must be positive and finite, not {weight}")


class Turns:
    """Gives the device to one model at a time, for one step: to the model that has used least device time for
    its weight (start-time fair queueing, Goyal, Vin & Cheng 1996).

    A step is charged the time from its start to its results, by `clock`, and overlapping steps are not
    charged twice. Shares hold between models that have steps; a model without steps saves up only a
    moment."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.holder: Turn | None = None
        self.members: set[Turn] = set()
        # In order of their requests.
        self.waiting: dict[Turn, asyncio.Future[None]] = {}
        # The virtual time of the last turn.
        self.now = 0.0
        self.charged_until = -math.inf
        self._is_choosing = False

    def join(self, weight: float) -> "Turn":
        """Adds a model. Raises ValueError for an invalid weight."""
        check_weight(weight)
        turn = Turn(self, weight)
        self.members.add(turn)
        return turn

    def choose(self) -> None:
        """Gives the next turn, after some rounds of the event loop, unless a model has it."""
        if len(self.members) == 1:
            self._grant()
        elif not self._is_choosing:
            self._is_choosing = True
            self._count_down(_ROUNDS)

    def _count_down(self, rounds: int) -> None:
        if rounds:
            asyncio.get_running_loop().call_soon(self._count_down, rounds - 1)
            return
        self._is_choosing = False
        self._grant()

    def _grant(self) -> None:
        if self.holder is not None or not self.waiting:
            return
        first = min(self.waiting, key=lambda turn: turn.virtual_time)
        granted = self.waiting.pop(first)
        self.now = max(self.now, first.virtual_time)
        self.holder = first
        if not granted.cancelled():
            granted.set_result(None)
        else:
            first.end()


class Turn:
    """One model's turns: `async with` waits for one and ends it. `seconds` is its device time."""

    def __init__(self, turns: Turns, weight: float) -> None:
        self._turns = turns
        self.weight = weight
        self.seconds = 0.0
        self.virtual_time = 0.0

    async def __aenter__(self) -> Self:
        turns = self._turns
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.virtual_time = max(self.virtual_time, turns.now - _CREDIT_SECONDS / self.weight)
        turns.waiting[self] = granted
        if turns.holder is None:
            turns.choose()
        try:
            await granted
        except asyncio.CancelledError:
            turns.waiting.pop(self, None)
            if turns.holder is self:
                self.end()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        assert self._turns.holder is self
        self._turns.holder = None
        if self._turns.waiting:
            self._turns.choose()

    def charge(self, started: float) -> float:
        """Charges a step from `started` until now. Returns its seconds on the device."""
        now = self._turns.clock()
        seconds = max(0.0, now - max(started, self._turns.charged_until))
        self._turns.charged_until = now
        self.seconds += seconds
        self.virtual_time += seconds / self.weight
        return seconds

    @property
    def is_anothers(self) -> bool:
        """Whether the device runs a step of another model."""
        return self._turns.holder not in (None, self)

    def leave(self) -> None:
        self._turns.members.discard(self)
