"""Actors: asyncio tasks that own state and read typed messages from a mailbox.

What the messages mean is the actors' own business.
"""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")


@dataclass(frozen=True, slots=True, eq=False)
class _Letter(Generic[M]):
    message: M
    reply: asyncio.Future[None] | None


class Mailbox(Generic[M]):
    """The queue in front of an actor.

    Backpressure is in how one sends: `ask` waits until the message has been dealt with, and `post` is for
    messages whose number is bounded by other means (steps in flight, admitted requests).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: asyncio.Queue[_Letter[M]] = asyncio.Queue()

    def post(self, message: M) -> None:
        """Delivers a message without waiting, from this loop or any thread."""
        self._loop.call_soon_threadsafe(self._letters.put_nowait, _Letter(message, None))

    async def ask(self, message: M) -> None:
        """Delivers a message and waits until it has been dealt with; raises what that raised.

        For senders on the actor's own loop."""
        reply: asyncio.Future[None] = self._loop.create_future()
        self._letters.put_nowait(_Letter(message, reply))
        await reply

    async def next(self) -> _Letter[M]:
        return await self._letters.get()


class Actor(ABC, Generic[M]):
    """Owns its state: only its own `receive` may touch it. Dies of what `receive` raises, unless the sender
    asked for a reply and so is told."""

    def __init__(self, mailbox: Mailbox[M]) -> None:
        self.mailbox = mailbox

    @abstractmethod
    async def receive(self, message: M) -> None:
        """Deals with one message; the next is not read before this returns."""

    async def run(self) -> None:
        while True:
            letter = await self.mailbox.next()
            if letter.reply is None:
                await self.receive(letter.message)
                continue
            try:
                await self.receive(letter.message)
            except Exception as error:
                if not letter.reply.done():
                    letter.reply.set_exception(error)
            else:
                if not letter.reply.done():
                    letter.reply.set_result(None)
