"""Actors: asyncio tasks that own state and read typed messages from a mailbox.

What the messages mean is the actors' own business.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

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
        self._letters: deque[_Letter[M]] = deque()
        self._deal_with: Callable[[M], Awaitable[object]] | None = None
        # What the actor waits for while it has nothing to do.
        self._news: asyncio.Future[None] | None = None

    def belongs_to(self, deal_with: Callable[[M], Awaitable[object]]) -> None:
        """Notes what the actor deals with messages by."""
        self._deal_with = deal_with

    def post(self, message: M) -> None:
        """Delivers a message without waiting, from any thread."""
        self._loop.call_soon_threadsafe(self.tell, message)

    def tell(self, message: M) -> None:
        """Delivers a message without waiting, before this returns. For senders on the actor's own loop."""
        self._letters.append(_Letter(message, None))
        self._wake()

    async def ask(self, question: Question[R]) -> R:
        """Delivers a message and waits for the answer; raises what dealing with it raised.

        For senders on the actor's own loop. An actor that has nothing to do deals with it in this call: to
        hand a question over and the answer back takes two rounds of the loop."""
        message = cast("M", question)
        news = self._news
        if self._deal_with is None or news is None or news.done():
            reply: asyncio.Future[R] = self._loop.create_future()
            self._letters.append(_Letter(message, reply))
            self._wake()
            return await reply
        self._news = None  # other messages wait until this one is dealt with
        try:
            return cast("R", await self._deal_with(message))
        finally:
            self._news = news
            if self._letters:
                self._wake()

    async def next(self) -> _Letter[M]:
        while not self._letters:
            news = self._news = self._loop.create_future()
            try:
                await news
            finally:
                self._news = None
        return self._letters.popleft()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class Actor(ABC, Generic[M]):
    """Owns its state: only its own `receive` may touch it. Dies of what `receive` raises, unless the message
    was a question, whose sender is given the error."""

    def __init__(self, mailbox: Mailbox[M]) -> None:
        self.mailbox = mailbox
        mailbox.belongs_to(self.receive)

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
