"""Actors, asyncio tasks that own state and read typed messages from a mailbox, and their messages."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.requests import RunOptions, Timings, Value, Values
from maxsimd.engine.scoring.scorer import Releases, RequestFailure, SkippedSequence, StepOutcome
from maxsimd.pooling.dispatch import Pooled
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.scheduler import CachedBatch, ResultSlot, Step, WaitingRequest

M = TypeVar("M")
R = TypeVar("R")


class Question(Generic[R]):
    """A message that is answered with an R."""

    __slots__ = ()


class Mailbox(Generic[M]):
    """The queue of an actor. `ask` waits for the answer; `tell` and `post` are for messages whose number is
    bounded by other means (steps in flight, admitted requests)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: asyncio.Queue[tuple[M, asyncio.Future[Any] | None]] = asyncio.Queue()

    def post(self, message: M) -> None:
        """Delivers a message without waiting, from any thread."""
        self._loop.call_soon_threadsafe(self._letters.put_nowait, (message, None))

    def tell(self, message: M) -> None:
        """Delivers a message before it returns. For senders on the actor's own loop."""
        self._letters.put_nowait((message, None))

    async def ask(self, question: Question[R]) -> R:
        """Delivers a message and waits for the answer, or raises its error. For the actor's own loop."""
        reply: asyncio.Future[R] = self._loop.create_future()
        self._letters.put_nowait((cast("M", question), reply))
        return await reply

    async def next(self) -> tuple[M, asyncio.Future[Any] | None]:
        """The next message, and the reply that its sender waits for."""
        return await self._letters.get()


class Actor(ABC, Generic[M]):
    """Owns its state, which only `receive` touches. An error of `receive` ends the actor, unless the message
    was a question, whose sender gets the error."""

    def __init__(self, mailbox: Mailbox[M]) -> None:
        self.mailbox = mailbox

    @abstractmethod
    async def receive(self, message: M) -> object:
        """Handles one message. Returns the answer to a question."""

    async def run(self) -> None:
        while True:
            message, reply = await self.mailbox.next()
            if reply is None:
                await self.receive(message)
                continue
            try:
                answer = await self.receive(message)
            except Exception as error:
                if not reply.done():
                    reply.set_exception(error)
            else:
                if not reply.done():
                    reply.set_result(answer)


class OpenRequest:
    """Engine to scheduler: run what is `waiting` and resolve `future` with `num_results` values by index.

    `arrived` is called with the values so far whenever some have arrived; it must not change them, nor block.
    `refusal_of` returns an error for a value that is not finite, by index, if the input is the cause.
    `errors` are the reasons why indexes have no value."""

    def __init__(
        self,
        waiting: WaitingRequest,
        num_results: int,
        options: RunOptions,
        future: asyncio.Future[Values],
        arrived: Callable[[list[Value | None]], None] | None = None,
        refusal_of: Callable[[int], InvalidRequestError | None] = lambda index: None,
    ) -> None:
        self.request_id = waiting.request_id
        self.waiting = waiting
        self.options = options
        self.future = future
        self.errors: dict[int, str] = {}
        self.missing = num_results
        self.score_seconds = self.device_seconds = 0.0
        self.refusal_of = refusal_of
        self._arrived = arrived
        self._values: list[Value | None] = [None] * num_results
        self._queued = time.perf_counter()
        self._begun: float | None = None

    def begin(self) -> None:
        """Notes the first step with a part of it."""
        if self._begun is None:
            self._begun = time.perf_counter()

    def store(self, index: int, value: Value) -> bool:
        """Stores a finite value, unless its index has failed. Returns whether it is finite."""
        is_finite = math.isfinite(value) if isinstance(value, float) else bool(np.isfinite(value).all())
        if is_finite and index not in self.errors:
            self.missing -= self._values[index] is None
            self._values[index] = value
        return is_finite

    def give_up(self, indexes: Iterable[int], reason: str) -> bool:
        """Marks values as failed, if the request reports errors. Returns whether it does."""
        if self.options.on_error == "fail":
            return False
        for index in indexes:
            if self._values[index] is None and index not in self.errors:
                self.errors[index] = reason
                self.missing -= 1
        return True

    def tell_progress(self) -> BaseException | None:
        """Tells the caller how many values have arrived. Returns the error of the caller's function."""
        if self.future.done():
            return None
        if self._arrived is not None:
            self._arrived(self._values)
        progress = self.options.progress
        if progress is None or not self._values:  # all may be cached
            return None
        try:
            progress(len(self._values) - self.missing, len(self._values))
        except (Exception, asyncio.CancelledError) as error:
            return error
        return None

    def finish(self) -> None:
        """Resolves the request with the values so far."""
        if self.future.done():
            return
        now = time.perf_counter()
        begun = now if self._begun is None else self._begun
        model = max(0.0, now - begun - self.score_seconds)
        timings = Timings(
            queue=begun - self._queued, model=model, score=self.score_seconds, device=self.device_seconds
        )
        self.future.set_result(Values(self._values, self.errors, timings))

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class EndEarly:
    """Engine to scheduler: a request has timed out; resolve it with the values so far."""

    request_id: int


@dataclass(frozen=True, slots=True)
class SetWeights:
    """Engine to scheduler: use these weights of tenants, 1 by default."""

    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Pool(Question[list[Pooled]]):
    """Runner to pooling: pool the hidden states of a step."""

    states: torch.Tensor
    cursor: PoolingCursor


@dataclass(frozen=True, slots=True, eq=False)
class Score(Question[StepOutcome]):
    """Runner to scoring: score a step's finished and skipped sequences and its cached documents."""

    pooled: list[Pooled]
    skipped: list[SkippedSequence]
    cached: tuple[CachedBatch, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Runner to scoring: a step is delivered; release its state."""

    releases: Releases


@dataclass(frozen=True, slots=True)
class DropSequences:
    """Runner to pooling: free the state of these sequences. Runner to scoring: an attempt with them has
    failed; forget their windows."""

    sequence_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class DropRequest:
    """Engine to scheduler, scheduler to runner, runner to scoring: a request has ended; free its state."""

    request_id: int


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """Runner to scheduler: the outcome of `num_parts` parts of a step, with `num_tokens` run and cached
    documents and pictures of `other_price` tokens.

    `seconds` have passed since the step started, `score_seconds` of them for scoring. On a shared device the
    step had `waited` for its turn before, and used `device_seconds`."""

    step_id: int
    num_parts: int
    num_tokens: int = 0
    other_price: int = 0
    seconds: float = 0.0
    results: tuple[tuple[ResultSlot, Value], ...] = ()
    failures: tuple[RequestFailure, ...] = ()
    score_seconds: float = 0.0
    out_of_memory: bool = False
    waited: float = 0.0
    device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class StepEnding:
    """Runner to scheduler: the last stage of a step has started, and it is none of pictures. Choose the next
    step."""

    step_id: int


@dataclass(frozen=True, slots=True)
class ChooseStep:
    """Scheduler to itself: the step on the device is nearly done; choose the next one."""


SchedulerMessage = OpenRequest | ChooseStep | DropRequest | EndEarly | SetWeights | StepEnding | StepReport
RunnerMessage = Step | DropRequest
PoolingMessage = Pool | DropSequences
ScoringMessage = Score | Commit | DropSequences | DropRequest
