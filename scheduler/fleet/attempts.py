"""The parts of a request from sending to answer: a state machine without clock, network or engine.

Whoever sends the parts tells what became of each, and is told what to send next, or why the request fails.
A part is done twice rather than lost: an attempt that was given up is answered in vain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler.fleet.members import Member
from maxsimd.scheduler.fleet.plan import Part


class RetryBudget:
    """Tries that may follow others: a `share` of all parts that were sent lately, and `spare` beyond.
    For one thread."""

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

Kind = Literal["full", "lost"]


@dataclass(frozen=True, slots=True)
class Send:
    """A part is to be sent to a member, as this attempt. A part `is_suspect` once two members died with it:
    no member may have two such parts at once, so that one which kills does not take others with it."""

    attempt: int
    part: Part
    member: Member
    is_suspect: bool


@dataclass(frozen=True, slots=True)
class FleetError:
    """Why a request fails. `full`: no member has room, and one may have it in `retry_after` seconds. `lost`:
    members died; the `indices` are the documents that may have killed them."""

    kind: Kind
    message: str
    indices: tuple[int, ...] = ()
    retry_after: float = 0.0


@dataclass(frozen=True, slots=True)
class Fail:
    """The request fails, and what is under way for it is to be cancelled."""

    error: FleetError
    cancelled: tuple[int, ...]


@dataclass(slots=True)
class _Course:
    """A part's history: the members that died with it, whether it is a half, those without room, and
    how often a member did not answer."""

    part: Part
    lost: set[str] = field(default_factory=set)
    is_half: bool = False
    full: dict[str, float] = field(default_factory=dict)
    unanswered: int = 0


class Attempts:
    """The parts of one request, from the first attempt to the answer. For one thread.

    A part whose member dies goes to another one. One that has lost two members is halved, and each half tried
    once more, alone; a half that loses its member fails the request, with a message that names its
    documents. So a document that kills engines kills three of them. A part whose member has no room goes to
    one other member. Both count against `budget`.
    """

    def __init__(self, parts: Sequence[Part], budget: RetryBudget) -> None:
        self._budget = budget
        self._under_way: dict[int, tuple[_Course, Member]] = {}
        self._waiting = [_Course(part) for part in parts]
        self._numbered = 0
        self._error: FleetError | None = None

    @property
    def is_over(self) -> bool:
        """Whether all parts are answered, or the request has failed."""
        return self._error is not None or not (self._under_way or self._waiting)

    def begin(self) -> list[Send]:
        """The first attempts of all parts."""
        sends = []
        while self._waiting:
            course = self._waiting.pop()
            self._budget.sent()
            sends.append(self._send(course, course.part.members[0]))
        return sends

    def answered(self, attempt: int) -> bool:
        """An attempt was answered with scores: whether they count. They do not where another attempt took its
        place, or the request has failed."""
        return self._error is None and self._under_way.pop(attempt, None) is not None

    def lost(self, attempt: int, alive: Sequence[Member]) -> list[Send] | Fail:
        """An attempt's member died, or cannot be reached; `alive` are those of the same fingerprint. Where
        none is left but those that died with the part, whoever asks waits as long as the request may."""
        found = self._ended(attempt)
        if found is None:
            return []
        course, member = found
        course.lost.add(member.name)
        documents = tuple(course.part.indices.tolist())
        if course.is_half:
            message = f"three engines died while they scored {_named(documents)}; leave these out"
            return self._fail(FleetError("lost", message, documents))
        halves = [course] if len(course.lost) < _SUSPECT else _halves(course)
        chosen = []
        for each in halves:
            others = [other for other in _in_turn(each.part, alive) if other.name not in each.lost]
            if not others:
                return self._fail(FleetError("lost", "no engine is left; try again shortly", retry_after=1.0))
            if not self._budget.take():
                message = "engines died, and too many requests are tried again; try again shortly"
                return self._fail(FleetError("lost", message, retry_after=1.0))
            chosen.append((each, others[0]))
        return [self._send(each, other) for each, other in chosen]

    def unsent(self, attempt: int, alive: Sequence[Member]) -> list[Send] | Fail:
        """An attempt's member was gone before anything was sent to it: another takes its place. Nothing is
        said of the part by that, and it counts for nothing."""
        return self._elsewhere(attempt, alive, counts=False)

    def unanswered(self, attempt: int, alive: Sequence[Member]) -> list[Send] | Fail:
        """An attempt's member does not answer: another takes its place, or the same once it does. Members
        stop for reasons of their own, so the part is not suspected. But it may be why they are silent, and
        fails after some attempts."""
        return self._elsewhere(attempt, alive, counts=True)

    def _elsewhere(self, attempt: int, alive: Sequence[Member], counts: bool) -> list[Send] | Fail:
        """Sends the part of an attempt to the first of `alive`; this `counts` against the budget or not."""
        found = self._ended(attempt)
        if found is None:
            return []
        course, _ = found
        course.unanswered += counts
        if course.unanswered == _UNANSWERED:
            message = "replicas did not answer while they had this request; try again shortly"
            return self._fail(FleetError("lost", message, retry_after=1.0))
        others = [other for other in _in_turn(course.part, alive) if other.name not in course.lost]
        if not others:
            return self._fail(FleetError("lost", "no engine is left; try again shortly", retry_after=1.0))
        if counts and not self._budget.take():
            message = "engines do not answer, and too many requests are tried again; try again shortly"
            return self._fail(FleetError("lost", message, retry_after=1.0))
        return [self._send(course, others[0])]

    def avoided(self, attempt: int) -> set[str]:
        """The names of those to whom the part of an attempt that has failed is not sent again."""
        found = self._under_way.get(attempt)
        return set() if found is None else {*found[0].lost, found[1].name}

    def full(self, attempt: int, retry_after: float, alive: Sequence[Member]) -> list[Send] | Fail:
        """An attempt's member has no room, and says after how many seconds it may have it."""
        found = self._ended(attempt)
        if found is None:
            return []
        course, member = found
        course.full[member.name] = retry_after
        avoided = {*course.lost, *course.full}
        others = [other for other in _in_turn(course.part, alive) if other.name not in avoided]
        if len(course.full) < _REFUSALS and others and self._budget.take():
            return [self._send(course, others[0])]
        longest = max(course.full.values())
        return self._fail(FleetError("full", "all engines are busy; try again later", retry_after=longest))

    def _ended(self, attempt: int) -> tuple[_Course, Member] | None:
        return None if self._error else self._under_way.pop(attempt, None)

    def _send(self, course: _Course, member: Member) -> Send:
        self._numbered += 1
        self._under_way[self._numbered] = course, member
        return Send(self._numbered, course.part, member, course.is_half)

    def _fail(self, error: FleetError) -> Fail:
        self._error = error
        cancelled = tuple(self._under_way)
        self._under_way.clear()
        return Fail(error, cancelled)


def _in_turn(part: Part, alive: Sequence[Member]) -> list[Member]:
    """Members that may take a part, in its order; then those that came since it was planned."""
    by_name = {member.name: member for member in alive}
    planned = [member for member in part.members if member.name in by_name]
    names = {member.name for member in planned}
    return [*planned, *(member for member in alive if member.name not in names)]


def _halves(course: _Course) -> list[_Course]:
    """The two halves of a part, or the part itself where it is one document or its documents belong
    together."""
    part, middle = course.part, len(course.part.indices) // 2
    if part.is_whole:
        return [_Course(part, set(course.lost), True)]
    pieces: list[NDArray[np.int64]] = [each for each in np.split(part.indices, [middle]) if len(each)]
    return [
        _Course(
            Part(part.members, piece, part.weight * len(piece) // len(part.indices)), set(course.lost), True
        )
        for piece in pieces
    ]


def _named(documents: Sequence[int]) -> str:
    """Documents as a message names them: up to eight, and how many more there are."""
    named = ", ".join(f"documents[{index}]" for index in documents[:8])
    return named if len(documents) <= 8 else f"{named} and {len(documents) - 8:,} more"


class Merge:
    """The scores of a request's documents, each written once. For one thread."""

    def __init__(self, num_documents: int) -> None:
        self._scores = np.full(num_documents, np.nan)
        self._is_written = np.zeros(num_documents, dtype=np.bool_)

    def commit(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Writes the scores of a part's documents. Raises ValueError, and writes nothing, where there are not
        as many scores as documents, or a document is none of the request's, comes twice, or is written."""
        if indices.shape != scores.shape:
            raise ValueError(f"{scores.size:,} scores for {indices.size:,} documents")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self._scores):
            raise ValueError(f"a document beyond the request's {len(self._scores):,}")
        if len(np.unique(indices)) < len(indices) or self._is_written[indices].any():
            raise ValueError("a document's score came twice")
        self._scores[indices] = scores
        self._is_written[indices] = True

    def result(self) -> NDArray[np.float64]:
        """The scores [N] in the request's order. Raises ValueError where one is missing."""
        if not self._is_written.all():
            raise ValueError(f"{np.count_nonzero(~self._is_written):,} documents have no score yet")
        return self._scores
