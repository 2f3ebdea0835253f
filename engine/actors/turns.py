"""The turns of models on a shared device. Lives on the device thread's event loop; others may read its
counts."""

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType
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
        self._members: list[Turn] = []
        # In order of their requests.
        self._waiting: dict[Turn, asyncio.Future[None]] = {}
        self._now = 0.0
        self._charged_until = -math.inf
        self._is_choosing = False

    def join(self, weight: float) -> "Turn":
        """Adds a model. Raises ValueError for an invalid weight."""
        check_weight(weight)
        turn = Turn(self, weight)
        self._members.append(turn)
        return turn

    def leave(self, turn: "Turn") -> None:
        if turn in self._members:
            self._members.remove(turn)

    def request(self, turn: "Turn", granted: asyncio.Future[None]) -> None:
        """Requests a turn; `granted` is done when it starts."""
        turn.virtual_time = max(turn.virtual_time, self._now - _CREDIT_SECONDS / turn.weight)
        self._waiting[turn] = granted
        if self.holder is None:
            self._choose_after_rounds()

    def withdraw(self, turn: "Turn") -> None:
        """Withdraws a request, and ends a turn that was granted."""
        self._waiting.pop(turn, None)
        if self.holder is turn:
            self.end(turn)

    def end(self, turn: "Turn") -> None:
        assert self.holder is turn
        self.holder = None
        if self._waiting:
            self._choose_after_rounds()

    def charge(self, turn: "Turn", started: float) -> float:
        """Charges a step from `started` until now. Returns its seconds."""
        now = self.clock()
        seconds = max(0.0, now - max(started, self._charged_until))
        self._charged_until = now
        turn.seconds += seconds
        turn.virtual_time += seconds / turn.weight
        return seconds

    def _choose_after_rounds(self) -> None:
        if len(self._members) == 1:
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
        if self.holder is not None or not self._waiting:
            return
        first = min(self._waiting, key=lambda turn: turn.virtual_time)
        granted = self._waiting.pop(first)
        self._now = max(self._now, first.virtual_time)
        self.holder = first
        if not granted.cancelled():
            granted.set_result(None)
        else:
            self.end(first)


class Turn:
    """One model's turns: `async with` waits for one and ends it. `seconds` is the device time that the model
    has used. Only `Turns` changes it."""

    def __init__(self, turns: Turns, weight: float) -> None:
        self._turns = turns
        self.weight = weight
        self.seconds = 0.0
        self.virtual_time = 0.0

    async def __aenter__(self) -> Self:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.request(self, granted)
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
        """Charges a step from `started` until now. Returns its seconds on the device."""
        return self._turns.charge(self, started)

    @property
    def is_anothers(self) -> bool:
        """Whether the device runs a step of another model."""
        holder = self._turns.holder
        return holder is not None and holder is not self

    def leave(self) -> None:
        self._turns.leave(self)
