"""One request over the engines of a fleet: planned, sent in parts, tried again where an engine dies, and put
together."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import getrandbits
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from maxsimd.api.fleet.failures import as_error, renumbered
from maxsimd.api.fleet.link import LostError, NotSentError, SilentError
from maxsimd.api.fleet.messages import Answer, Arrived, Failed, Question, Reply
from maxsimd.api.fleet.roster import Roster
from maxsimd.engine.errors import (
    EngineNotReadyError,
    RequestFailedError,
    RequestTimeoutError,
)
from maxsimd.scheduler.fleet import (
    Attempts,
    Cell,
    Fail,
    FleetError,
    Loads,
    Member,
    Reach,
    RetryBudget,
    Seen,
    Send,
    Split,
    cells_of,
    plan,
    reach_of,
)
from maxsimd.scheduler.fleet.plan import Documents, Part

# Documents that a front remembers having sent.
_REMEMBERED = 200_000
# An engine that has not answered this many seconds after the deadline hangs.
_HANGS = 1.0
# What replies say of the queue at an engine is forgotten this often, in seconds.
_QUEUES_FOR = 1.0
# Parts that may be tried again beyond a tenth of all: those that are at an engine when it dies.
_SPARE_TRIES = 1_000.0


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What is to be spread: documents, by their digests [N] and estimated tokens [N]. `question` makes what
    is asked about some of them, given the seconds that are left; `commit` takes the answer about them, and
    `arrived` what comes before it. With `is_cached`, engines look for the documents in their
    caches: those that were there before weigh little.

    Where it has several parts, another job is done `first`, by the engine that has most of it; with
    `needs_first` it fails where there is no time for that. `deadly` is said where engines die of it, in
    place of a message that names documents."""

    digests: NDArray[np.uint64]
    tokens: NDArray[np.int64]
    split: Split
    timeout: float | None
    is_cached: bool
    question: Callable[[NDArray[np.int64], float | None], Question]
    commit: Callable[[NDArray[np.int64], Answer], None]
    arrived: Callable[[NDArray[np.int64], Arrived], None] | None = None
    first: "Job | None" = None
    needs_first: bool = True
    deadly: str | None = None


class Spreader:
    """Spreads the requests of one front. A request without a timeout waits for `patience` seconds for an
    engine while there is none. For one event loop."""

    def __init__(self, roster: Roster, patience: float) -> None:
        self._roster = roster
        self._patience = patience
        self._loads = Loads()
        self._forgot = 0.0
        self._seen = Seen(_REMEMBERED)
        self._budget = RetryBudget(spare=_SPARE_TRIES)

    @property
    def loads(self) -> Loads:
        """What each engine has to do, in tokens."""
        return self._loads

    async def run(self, job: Job, least_tokens: int) -> None:
        """Returns when all documents are committed. Raises the errors of `Engine`, and ReplacedError where
        other engines have taken over, with another model or precision."""
        deadline = None if job.timeout is None else asyncio.get_running_loop().time() + job.timeout
        try:
            await self._run(job, least_tokens, deadline)
        except TimeoutError:
            assert job.timeout is not None
            raise RequestTimeoutError.after(job.timeout) from None

    async def _run(self, job: Job, least_tokens: int, deadline: float | None) -> None:
        members = await self._members(deadline)
        if (now := asyncio.get_running_loop().time()) > self._forgot + _QUEUES_FOR:
            self._loads.forget_queued()
            self._forgot = now
        reach = reach_of(cells_of(members), self._load, getrandbits(64))
        weights = self._seen.weights(reach, job.digests, job.tokens) if job.is_cached else job.tokens
        documents = Documents(job.digests, job.tokens, weights)
        parts = plan(documents, reach, self._loads.of(reach.members), job.split, least_tokens)
        if job.first is not None and len(parts) > 1:
            try:
                await self._run_parts(job.first, [_by_one(job.first, parts)], reach, deadline)
            except TimeoutError:
                if job.needs_first:
                    raise
        await self._run_parts(job, parts, reach, deadline)

    def _load(self, cell: Cell) -> float:
        return float(self._loads.of(cell.members).mean())

    async def _run_parts(self, job: Job, parts: list[Part], reach: Reach, deadline: float | None) -> None:
        """Returns when all parts are committed."""
        attempts = Attempts(parts, self._budget)
        under_way: dict[asyncio.Task[Reply], Send] = {}
        try:
            sends: list[Send] | Fail | None = attempts.begin()
            while True:
                if isinstance(sends, Fail):
                    raise _raised(sends.error, job)
                for send in sends or ():
                    under_way[asyncio.create_task(self._send(job, send, deadline))] = send
                if attempts.is_over:
                    return
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                sends = []
                for task in done:
                    send = under_way.pop(task)
                    next_sends = await self._ended(job, attempts, send, task, deadline)
                    if isinstance(next_sends, Fail):
                        sends = next_sends
                        break
                    sends += next_sends
                    if job.is_cached and _is_answered(task):
                        digests = job.digests[send.part.indices]
                        self._seen.remember(reach, digests.tolist(), send.member)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _ended(
        self, job: Job, attempts: Attempts, send: Send, task: "asyncio.Task[Reply]", deadline: float | None
    ) -> list[Send] | Fail:
        """What follows from an attempt that has ended."""
        error = task.exception()
        if isinstance(error, LostError):
            # Its part may go to those that did not die with it: where there is none, one will come.
            alive = await self._others(attempts, send, deadline)
            self._loads.forget_others(self._roster.members)
            match error:
                case NotSentError():
                    return attempts.unsent(send.attempt, alive)
                case SilentError():
                    return attempts.unanswered(send.attempt, alive)
            return attempts.lost(send.attempt, alive)
        if error is not None:
            raise error
        answer = task.result().answer
        if not isinstance(answer, Failed):
            if attempts.answered(send.attempt):
                job.commit(send.part.indices, answer)
            return []
        if answer.kind in ("not ready", "dead"):
            return attempts.lost(send.attempt, await self._others(attempts, send, deadline))
        if answer.kind == "full" and answer.reason != "rate":
            alive = self._roster.alike(send.member.fingerprint)
            refused = attempts.full(send.attempt, answer.retry_after, alive)
            if isinstance(refused, Fail):
                # In the words of the engine that refused last, with the longest wait of them.
                raise as_error(msgspec.structs.replace(answer, retry_after=refused.error.retry_after))
            return refused
        if answer.kind == "timeout":
            raise TimeoutError
        raise as_error(renumbered(answer, send.part.indices.tolist()))

    async def _send(self, job: Job, send: Send, deadline: float | None) -> Reply:
        """The engine enforces the deadline; where it hangs the front does, somewhat later."""
        connected = self._roster.connected(send.member)
        async with asyncio.timeout_at(None if deadline is None else deadline + _HANGS):
            if send.is_suspect:
                async with connected.alone:
                    return await self._ask(job, send, deadline)
            return await self._ask(job, send, deadline)

    async def _ask(self, job: Job, send: Send, deadline: float | None) -> Reply:
        part, link = send.part, self._roster.connected(send.member).link
        arrived: Callable[[Arrived], None] | None = None
        if job.arrived is not None:
            tell = job.arrived

            def arrived(new: Arrived) -> None:
                tell(part.indices, new)

        queued = None
        self._loads.sent(send.member, part.weight)
        try:
            left = None if deadline is None else deadline - asyncio.get_running_loop().time()
            reply = await link.ask(job.question(part.indices, left), arrived)
            queued = reply.queued_tokens
            return reply
        finally:
            self._loads.answered(send.member, part.weight, queued)

    async def _members(self, deadline: float | None) -> tuple[Member, ...]:
        await self._until(self._roster.until_another(set()), deadline)
        return self._roster.members

    async def _others(self, attempts: Attempts, send: Send, deadline: float | None) -> tuple[Member, ...]:
        """Those that may take a part whose attempt has failed, once there are some."""
        fingerprint, avoided = send.member.fingerprint, attempts.avoided(send.attempt)
        await self._until(self._roster.until_another(avoided, fingerprint), deadline)
        return self._roster.alike(fingerprint)

    async def _until(self, there: Coroutine[Any, Any, None], deadline: float | None) -> None:
        """Raises TimeoutError at the deadline, and EngineNotReadyError before it where it is late."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + self._patience
        try:
            async with asyncio.timeout_at(patience if deadline is None else min(deadline, patience)):
                await there
        except TimeoutError:
            if deadline is not None and loop.time() >= deadline:
                raise
            raise EngineNotReadyError("no engine is there; try again shortly") from None


def _is_answered(task: "asyncio.Task[Reply]") -> bool:
    return task.exception() is None and not isinstance(task.result().answer, Failed)


def _by_one(job: Job, parts: list[Part]) -> Part:
    """All of a job for the engine that has the heaviest of the parts, and for others in that part's order."""
    members = max(parts, key=lambda part: part.weight).members
    return Part(members, np.arange(len(job.digests)), int(job.tokens.sum()), is_whole=True)


def _raised(error: FleetError, job: Job) -> Exception:
    if error.kind == "lost" and not error.indices:
        return EngineNotReadyError(error.message)
    return RequestFailedError(job.deadly or error.message)


def estimated_tokens(characters: Sequence[int]) -> NDArray[np.int64]:
    """About how many tokens texts have, by their lengths in characters."""
    return np.array(characters, dtype=np.int64) // 4 + 4
