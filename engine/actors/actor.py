"""Actors, asyncio tasks that own state and read typed messages from a mailbox, and their messages."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.requests import RunOptions, Value, Values
from maxsimd.engine.scoring.scorer import Releases, RequestFailure, Result, SkippedSequence, StepOutcome
from maxsimd.pooling.dispatch import Pooled
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.scheduler import CachedBatch, Step, WaitingRequest

M = TypeVar("M")
R = TypeVar("R")


class Question(Generic[R]):
    """A message that is answered with an R."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Letter(Generic[M]):
    message: M
    reply: asyncio.Future[Any] | None


class Mailbox(Generic[M]):
    """The queue of an actor. `ask` waits for the answer; `tell` and `post` are for messages whose number is
    bounded by other means (steps in flight, admitted requests)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: asyncio.Queue[_Letter[M]] = asyncio.Queue()

    def post(self, message: M) -> None:
        """Delivers a message without waiting, from any thread."""
        self._loop.call_soon_threadsafe(self._letters.put_nowait, _Letter(message, None))

    def tell(self, message: M) -> None:
        """Delivers a message before it returns. For senders on the actor's own loop."""
        self._letters.put_nowait(_Letter(message, None))

    async def ask(self, question: Question[R]) -> R:
        """Delivers a message and waits for the answer, or raises its error. For the actor's own loop."""
        reply: asyncio.Future[R] = self._loop.create_future()
        self._letters.put_nowait(_Letter(cast("M", question), reply))
        return await reply

    async def next(self) -> _Letter[M]:
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
            letter = await self.mailbox.next()
            if letter.reply is None:
                await self.receive(letter.message)
                continue
            try:
                answer = await self.receive(letter.message)
            except Exception as error:
                if not letter.reply.done():
                    letter.reply.set_exception(error)
            else:
                if not letter.reply.done():
                    letter.reply.set_result(answer)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Admit:
    """Engine to scheduler: run a request and resolve `values` with its `num_results` values by index.

    `arrived` is called with the values so far whenever some have arrived; it must not change them, nor block.
    `refusal_of` returns an error for a value that is not finite, by index, if the input is the cause."""

    request: WaitingRequest
    num_results: int
    options: RunOptions
    values: asyncio.Future[Values]
    arrived: Callable[[list[Value | None]], None] | None = None
    refusal_of: Callable[[int], InvalidRequestError | None] | None = None


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
    results: tuple[Result, ...] = ()
    failures: tuple[RequestFailure, ...] = ()
    score_seconds: float = 0.0
    out_of_memory: bool = False
    waited: float = 0.0
    device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class StepEnding:
    """Runner to scheduler: the last stage of a step has started, not one of pictures. Choose the next."""

    step_id: int


@dataclass(frozen=True, slots=True)
class ChooseStep:
    """Scheduler to itself: the step on the device is nearly done; choose the next one."""


SchedulerMessage = Admit | ChooseStep | DropRequest | EndEarly | SetWeights | StepEnding | StepReport
RunnerMessage = Step | DropRequest
PoolingMessage = Pool | DropSequences
ScoringMessage = Score | Commit | DropSequences | DropRequest
