"""The parts of a request from sending to answer: a state machine without clock, network or engine.

The sender reports the outcome of each part, and learns which to send next. A part may be done twice, but is
never lost: the answer to an abandoned attempt does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from maxsimd.scheduler.fleet.members import Member
from maxsimd.scheduler.fleet.plan import Part


class RetryBudget:
    """Retries: a `share` of the parts that were sent lately, and `spare` more. For one thread."""

    def __init__(self, share: float = 0.1, spare: float = 20.0) -> None:
        self._share = share
        self._most = self._left = spare

    def sent(self) -> None:
        """A part was sent for the first time."""
        self._left = min(self._most, self._left + self._share)

    def take(self) -> bool:
        """Whether one may be sent again, which then counts."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


# Members lost with a part before it is suspected of killing them.
_SUSPECT = 2
# Unanswered sends after which a part fails.
_UNANSWERED = 4
# Members without room that are asked.
_REFUSALS = 2


@dataclass(frozen=True, slots=True)
class Send:
    """An attempt to be made: a part for a member. It `is_suspect` once two members died with it. A member may
    have only one such part at a time, so that a deadly one is known."""

    attempt: int
    part: Part
    member: Member
    is_suspect: bool


class FleetError(Exception):
    """A request fails: the documents of these `indices` may have killed members, or no member takes a part,
    and one may in `retry_after` seconds."""

    def __init__(self, message: str, indices: tuple[int, ...] = (), retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.indices = indices
        self.retry_after = retry_after


@dataclass(slots=True)
class _Course:
    """A part's history: members that died with it or had no room, and how often one did not answer."""

    part: Part
    lost: set[str] = field(default_factory=set)
    is_half: bool = False
    full: dict[str, float] = field(default_factory=dict)
    unanswered: int = 0


class Attempts:
    """The parts of one request, from the first attempt to the answer. For one thread.

    A part whose member dies goes to another one. Once it has lost two members it is halved, and each half is
    tried alone. A half that loses its member fails the request, so a deadly document kills three engines. A
    part whose member has no room goes to one other. Both count against `budget`. `alive` are the members of
    the request's fingerprint. Methods raise FleetError where the request fails."""

    def __init__(self, parts: Sequence[Part], budget: RetryBudget) -> None:
        self._parts = parts
        self._budget = budget
        self._under_way: dict[int, tuple[_Course, Member]] = {}
        self._numbered = 0

    @property
    def is_over(self) -> bool:
        """Whether all parts are answered, or the request has failed."""
        return not self._under_way

    def begin(self) -> list[Send]:
        """The first attempts of all parts."""
        sends = []
        for part in self._parts:
            self._budget.sent()
            sends.append(self._send(_Course(part), part.members[0]))
        return sends

    def answered(self, attempt: int) -> bool:
        """Ends an attempt with an answer. Returns whether that counts: not if another attempt took its place,
        or the request has failed."""
        return self._under_way.pop(attempt, None) is not None

    def lost(self, attempt: int, alive: Sequence[Member]) -> list[Send]:
        """An attempt's member died, or cannot be reached. If all of `alive` died with the part, the request
        fails: callers wait for another before they ask."""
        found = self._under_way.pop(attempt, None)
        if found is None:
            return []
        course, member = found
        course.lost.add(member.name)
        if course.is_half:
            documents = tuple(course.part.indices.tolist())
            message = f"three engines died while they scored {_named(documents)}; leave these out"
            raise self._failed(message, documents)
        halves = [course] if len(course.lost) < _SUSPECT else _halves(course)
        return [self._send_elsewhere(half, alive, "engines died") for half in halves]

    def unsent(self, attempt: int, alive: Sequence[Member]) -> list[Send]:
        """An attempt's member was gone before anything was sent: another takes its place, which is free."""
        found = self._under_way.pop(attempt, None)
        return [] if found is None else [self._send_elsewhere(found[0], alive, None)]

    def unanswered(self, attempt: int, alive: Sequence[Member]) -> list[Send]:
        """An attempt's member does not answer: another takes its place, or the same once it does. Members
        stop for reasons of their own, so the part is not suspected. But it may be why they are silent, and
        fails after some attempts."""
        found = self._under_way.pop(attempt, None)
        if found is None:
            return []
        course, _ = found
        course.unanswered += 1
        if course.unanswered == _UNANSWERED:
            raise self._failed("replicas did not answer while they had this request; try again shortly")
        return [self._send_elsewhere(course, alive, "engines do not answer")]

    def avoided(self, attempt: int) -> set[str]:
        """The names of those to whom the part of an attempt that has failed is not sent again."""
        found = self._under_way.get(attempt)
        return set() if found is None else {*found[0].lost, found[1].name}

    def full(self, attempt: int, retry_after: float, alive: Sequence[Member]) -> list[Send]:
        """An attempt's member has no room, and says after how many seconds it may have it."""
        found = self._under_way.pop(attempt, None)
        if found is None:
            return []
        course, member = found
        course.full[member.name] = retry_after
        others = _others(course, alive, {*course.lost, *course.full})
        if len(course.full) < _REFUSALS and others and self._budget.take():
            return [self._send(course, others[0])]
        longest = max(course.full.values())
        raise self._failed("all engines are busy; try again later", retry_after=longest)

    def _send_elsewhere(self, course: _Course, alive: Sequence[Member], reason: str | None) -> Send:
        """Sends a part to another member. It counts against the budget if there is a `reason`."""
        others = _others(course, alive, course.lost)
        if not others:
            raise self._failed("no engine is left; try again shortly")
        if reason is not None and not self._budget.take():
            raise self._failed(f"{reason}, and too many requests are tried again; try again shortly")
        return self._send(course, others[0])

    def _send(self, course: _Course, member: Member) -> Send:
        self._numbered += 1
        self._under_way[self._numbered] = course, member
        return Send(self._numbered, course.part, member, course.is_half)

    def _failed(self, message: str, indices: tuple[int, ...] = (), retry_after: float = 1.0) -> FleetError:
        self._under_way.clear()
        return FleetError(message, indices, retry_after)


def _others(course: _Course, alive: Sequence[Member], avoided: set[str]) -> list[Member]:
    """Members that may take a part, in its order; then those that came since it was planned."""
    may_take = {each.name: each for each in alive if each.name not in avoided}
    planned = [may_take.pop(each.name) for each in course.part.members if each.name in may_take]
    return [*planned, *may_take.values()]


def _halves(course: _Course) -> list[_Course]:
    """The two halves of a part, or the part itself where it is one document or its documents belong
    together."""
    part, count = course.part, len(course.part.indices)
    pieces = [part.indices] if part.is_whole else np.split(part.indices, [count // 2])
    halves = [
        replace(part, indices=piece, weight=part.weight * len(piece) // count)
        for piece in pieces
        if len(piece)
    ]
    return [_Course(half, set(course.lost), is_half=True) for half in halves]


def _named(documents: Sequence[int]) -> str:
    """Documents as a message names them: up to eight, and how many more there are."""
    named = ", ".join(f"documents[{index}]" for index in documents[:8])
    return named if len(documents) <= 8 else f"{named} and {len(documents) - 8:,} more"
