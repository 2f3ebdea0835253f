"""Actors: asyncio tasks that own state and read typed messages from a mailbox.

What the messages mean is the actors' own business.
"""

import asyncio
from abc import ABC, abstractmethod
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
