"""Actors: asyncio tasks that own state and read typed messages from a mailbox.

What the messages mean is the actors' own business.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.requests import RunOptions, Value, Values
from maxsimd.engine.scoring.scorer import (
    Releases,
    RequestFailure,
    Result,
    SkippedSequence,
    StepOutcome,
)
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
    """The queue in front of an actor.

    Backpressure is in how one sends: `ask` waits for the answer; `tell` and `post` are for messages whose
    number is bounded by other means (steps in flight, admitted requests).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: asyncio.Queue[_Letter[M]] = asyncio.Queue()

    def post(self, message: M) -> None:
        """Delivers a message without waiting, from any thread."""
        self._loop.call_soon_threadsafe(self._letters.put_nowait, _Letter(message, None))

    def tell(self, message: M) -> None:
        """Delivers a message without waiting, before this returns. For senders on the actor's own loop."""
        self._letters.put_nowait(_Letter(message, None))

    async def ask(self, question: Question[R]) -> R:
        """Delivers a message and waits for the answer; raises what dealing with it raised.

        For senders on the actor's own loop."""
        reply: asyncio.Future[R] = self._loop.create_future()
        self._letters.put_nowait(_Letter(cast("M", question), reply))
        return await reply

    async def next(self) -> _Letter[M]:
        return await self._letters.get()


class Actor(ABC, Generic[M]):
    """Owns its state: only its own `receive` may touch it. Dies of what `receive` raises, unless the message
    was a question, whose sender is given the error."""

    def __init__(self, mailbox: Mailbox[M]) -> None:
        self.mailbox = mailbox

    @abstractmethod
    async def receive(self, message: M) -> object:
        """Deals with one message before the next is read; returns the answer to a question."""

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
    """Engine to scheduler: run a request's sequences, score its cached documents, and resolve `values` with
    `num_results` values by index, as the options say. `arrived` is called with all that have come whenever
    some have; it must not change them, and not block. `refusal_of`
    takes the index of a value that is not finite, and returns an error if the caller's input is the cause."""

    request: WaitingRequest
    num_results: int
    options: RunOptions
    values: asyncio.Future[Values]
    arrived: Callable[[list[Value | None]], None] | None = None
    refusal_of: Callable[[int], InvalidRequestError | None] | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Engine to scheduler: nobody waits for this request any more."""

    request_id: int


@dataclass(frozen=True, slots=True)
class EndEarly:
    """Engine to scheduler: this request's time is up, resolve its values with those that have come."""

    request_id: int


@dataclass(frozen=True, slots=True)
class SetWeights:
    """Engine to scheduler: tenants weigh this from now on, and those that are not named 1."""

    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Release:
    """Scheduler to runner: this request has ended, forget all that it left on the device."""

    request_id: int


@dataclass(frozen=True, slots=True, eq=False)
class Pool(Question[list[Pooled]]):
    """Runner to pooling: pool the hidden states of a step."""

    states: torch.Tensor
    cursor: PoolingCursor


@dataclass(frozen=True, slots=True)
class FreeSequences:
    """Runner to pooling: forget the state of these cut sequences, by their ids."""

    sequence_ids: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Score(Question[StepOutcome]):
    """Runner to scoring: score what a step finished, its sequences that were not run, and its cached
    documents."""

    pooled: list[Pooled]
    skipped: list[SkippedSequence]
    cached: tuple[CachedBatch, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Runner to scoring: a step is delivered, release what it has used up."""

    releases: Releases


@dataclass(frozen=True, slots=True)
class ForgetAttempt:
    """Runner to scoring: the attempt at a step with these sequences has failed, forget their windows."""

    sequence_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class DropRequest:
    """Runner to scoring: this request has ended, forget its queries and windows."""

    request_id: int


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """Runner to scheduler: what became of `num_parts` chunks, cached batches and pictures of a step.

    `num_tokens` were run, and cached documents scored and pictures encoded of the price `other_price`
    (tokens); `seconds` have passed since the step was begun, and `score_seconds` of them were for scoring.
    Where several models share the device, it had `waited` for its turn before, and had `device_seconds`."""

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
    """Runner to scheduler: the last stage of a step has begun; choose the next step, so that the device has
    something to do afterwards. Not sent for a last stage of pictures, whose report is enough."""

    step_id: int


@dataclass(frozen=True, slots=True)
class ChooseStep:
    """Scheduler to itself: the step on the device is nearly done; choose the next."""


SchedulerMessage = Admit | Cancel | ChooseStep | EndEarly | SetWeights | StepEnding | StepReport
RunnerMessage = Step | Release
PoolingMessage = Pool | FreeSequences
ScoringMessage = Score | Commit | ForgetAttempt | DropRequest
