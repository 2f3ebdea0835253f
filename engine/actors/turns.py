"""Whose step runs next on a device that several models share: the turns of their runners. Lives on the device
thread's event loop; others may read what has been counted."""

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

# A model that has asked for no turn for a while comes in front of the others by this much time on the device
# at most. Between two steps of a busy model there may be a moment without a request, for which it is not to
# lose what it is due.
_CREDIT_SECONDS = 0.25
# A runner whose step has ended asks again at once if its next step is there. A message from another thread
# needs two rounds of the event loop to become such a request; they are waited for before one is chosen.
_ROUNDS = 3


def check_weight(weight: float) -> None:
    """Raises ValueError for one that means nothing."""
    if not 0 < weight < math.inf:
        raise ValueError(f"the weight of a model must be positive and finite, not {weight}")


class Turns:
    """Gives one model at a time the device, for one step: the one that has used least time on it for its
    weight (start-time fair queueing, Goyal, Vin & Cheng 1996).

    Time is charged when it has passed, by what `clock` says between a step's start and its results, and never
    twice where steps overlap. Shares hold only between models that have steps, and who has none costs nothing
    and saves nothing up but a moment."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.holder: Turn | None = None
        self._members: list[Turn] = []
        # In the order in which they asked.
        self._asking: dict[Turn, asyncio.Future[None]] = {}
        self._now = 0.0
        self._charged_until = -math.inf
        self._is_choosing = False

    def join(self, weight: float) -> "Turn":
        """What one more model takes its turns by. Raises ValueError for a weight that means nothing."""
        check_weight(weight)
        turn = Turn(self, weight)
        self._members.append(turn)
        return turn

    def leave(self, turn: "Turn") -> None:
        if turn in self._members:
            self._members.remove(turn)

    def ask(self, turn: "Turn", granted: asyncio.Future[None]) -> None:
        """Grants a turn as soon as it is this one's."""
        turn.virtual_time = max(turn.virtual_time, self._now - _CREDIT_SECONDS / turn.weight)
        self._asking[turn] = granted
        if self.holder is None:
            self._choose_soon()

    def withdraw(self, turn: "Turn") -> None:
        """Forgets that it asked, and takes back what it was given."""
        self._asking.pop(turn, None)
        if self.holder is turn:
            self.end(turn)

    def end(self, turn: "Turn") -> None:
        assert self.holder is turn
        self.holder = None
        if self._asking:
            self._choose_soon()

    def charge(self, turn: "Turn", started: float) -> float:
        """Notes that the results of a step are there that was begun at `started`; returns its seconds."""
        now = self.clock()
        seconds = max(0.0, now - max(started, self._charged_until))
        self._charged_until = now
        turn.seconds += seconds
        turn.virtual_time += seconds / turn.weight
        return seconds

    def _choose_soon(self) -> None:
        if len(self._members) == 1:
            self._grant()
        elif not self._is_choosing:
            self._is_choosing = True
            self._look(_ROUNDS)

    def _look(self, rounds: int) -> None:
        if rounds:
            asyncio.get_running_loop().call_soon(self._look, rounds - 1)
            return
        self._is_choosing = False
        self._grant()

    def _grant(self) -> None:
        if self.holder is not None or not self._asking:
            return
        first = min(self._asking, key=lambda turn: turn.virtual_time)
        granted = self._asking.pop(first)
        self._now = max(self._now, first.virtual_time)
        self.holder = first
        if not granted.cancelled():
            granted.set_result(None)
        else:
            self.end(first)


class Turn:
    """One model's turns: `async with` waits for one and ends it. `seconds` is the time that it has used on
    the device. Belongs to `Turns`, which alone changes it."""

    def __init__(self, turns: Turns, weight: float) -> None:
        self._turns = turns
        self.weight = weight
        self.seconds = 0.0
        self.virtual_time = 0.0

    async def __aenter__(self) -> Self:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.ask(self, granted)
        try:
            await granted
        except asyncio.CancelledError:
            self._turns.withdraw(self)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.end(self)

    def charge(self, started: float) -> float:
        """Notes that the results of a step are there that was begun at `started`; returns the seconds that it
        had of the device."""
        return self._turns.charge(self, started)

    @property
    def is_anothers(self) -> bool:
        """Whether the device runs a step of another model."""
        holder = self._turns.holder
        return holder is not None and holder is not self

    def leave(self) -> None:
        self._turns.leave(self)
