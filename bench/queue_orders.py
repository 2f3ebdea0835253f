"""Orders of work to simulate: the scheduler's, first come first served, and round robin.

All of them only for whole sequences that wait for nothing.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from maxsimd.scheduler import (
    OLDEST_SHARE,
    OVERDUE_SHARE,
    ResultSlot,
    Scheduler,
    StepLimits,
    Tokens,
    TokenSequence,
)


class Order(Protocol):
    """Which waiting sequences come next."""

    def admit(self, request_id: int, lengths: Sequence[int]) -> None: ...

    def step(self) -> dict[int, int]:
        """The tokens of each request in the next step."""
        ...


class FirstComeFirstServed:
    """Sequences of the request that came first, the longest that fits first; then of the next."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._waiting: dict[int, list[int]] = {}

    def admit(self, request_id: int, lengths: Sequence[int]) -> None:
        self._waiting[request_id] = sorted(lengths)

    def step(self) -> dict[int, int]:
        room = self._budget
        used: dict[int, int] = {}
        for request_id, lengths in self._waiting.items():
            while position := bisect_right(lengths, room):
                room -= lengths[position - 1]
                used[request_id] = used.get(request_id, 0) + lengths.pop(position - 1)
            if not room:
                break
        for request_id in used:
            if not self._waiting[request_id]:
                del self._waiting[request_id]
        return used


@dataclass(slots=True)
class _Turn:
    lengths: list[int]
    deficit: float = field(default=0.0)


class RoundRobin:
    """Deficit round robin by tokens (Shreedhar & Varghese 1995): a turn for each request in rotation, which
    moves on by one request a step; then whatever still fits."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._turns: dict[int, _Turn] = {}
        self._rotation: deque[int] = deque()

    def admit(self, request_id: int, lengths: Sequence[int]) -> None:
        self._turns[request_id] = _Turn(sorted(lengths))
        self._rotation.append(request_id)

    def step(self) -> dict[int, int]:
        room = self._budget
        used: dict[int, int] = {}
        quantum = self._budget / max(1, len(self._turns))
        for has_turn in (True, False):
            for request_id in self._rotation:
                turn = self._turns[request_id]
                if has_turn:
                    turn.deficit = min(turn.deficit + quantum, 2.0 * self._budget)
                while (turn.deficit > 0 or not has_turn) and (position := bisect_right(turn.lengths, room)):
                    length = turn.lengths.pop(position - 1)
                    turn.deficit -= length
                    room -= length
                    used[request_id] = used.get(request_id, 0) + length
                if not has_turn and not room:
                    break
        self._rotation.rotate(-1)
        for request_id in used:
            if not self._turns[request_id].lengths:
                del self._turns[request_id]
                self._rotation.remove(request_id)
        return used


class SchedulerOrder:
    """The real `Scheduler`, given texts."""

    def __init__(
        self,
        budget: int,
        oldest_share: float = OLDEST_SHARE,
        overdue_share: float = OVERDUE_SHARE,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        limits = StepLimits(budget, budget, chunked=False)
        self.scheduler = Scheduler(
            limits, weights=weights, oldest_share=oldest_share, overdue_share=overdue_share
        )
        self._tokens: dict[int, Tokens] = {}
        self._num_sequences = 0

    def admit(self, request_id: int, lengths: Sequence[int], tenant: str = "", priority: int = 0) -> None:
        slot = ResultSlot(request_id, 0)
        sequences = []
        for length in lengths:
            if length not in self._tokens:
                self._tokens[length] = Tokens(np.zeros(length, dtype=np.int32))
            sequences.append(TokenSequence.text(self._num_sequences, slot, "", self._tokens[length]))
            self._num_sequences += 1
        self.scheduler.admit(request_id, sequences, (), priority, tenant)

    def step(self) -> dict[int, int]:
        used: dict[int, int] = {}
        step = self.scheduler.schedule()
        for chunk in step.chunks if step is not None else ():
            request_id = chunk.sequence.request_id
            used[request_id] = used.get(request_id, 0) + len(chunk)
        return used
