"""Actors: asyncio tasks that own state and read typed messages from a mailbox.

What the messages mean is the actors' own business.
"""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")


@dataclass(slots=True, eq=False)
class _Letter(Generic[M]):
    message: M
    counted: bool
    reply: asyncio.Future[None] | None


class Mailbox(Generic[M]):
    """The queue in front of an actor; usable from the actor's own event loop and from any other.

    `capacity` bounds the messages that `send` and `ask` may leave waiting. `post` is for the few messages
    whose number is bounded by other means, and never waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, capacity: int = 64) -> None:
        self._loop = loop
        self._letters: asyncio.Queue[_Letter[M]] = asyncio.Queue()
        self._room = asyncio.Semaphore(capacity)

    def post(self, message: M) -> None:
        """Delivers a message without waiting, from any thread."""
        self._loop.call_soon_threadsafe(self._letters.put_nowait, _Letter(message, False, None))

    async def send(self, message: M) -> None:
        """Delivers a message; waits while the mailbox is full. For the actor's own loop."""
        await self._room.acquire()
        self._letters.put_nowait(_Letter(message, True, None))

    async def ask(self, message: M) -> None:
        """Delivers a message and waits until it has been dealt with; raises what that raised."""
        await self._room.acquire()
        reply: asyncio.Future[None] = self._loop.create_future()
        self._letters.put_nowait(_Letter(message, True, reply))
        await reply

    async def next(self) -> _Letter[M]:
        letter = await self._letters.get()
        if letter.counted:
            self._room.release()
        return letter


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
                letter.reply.set_exception(error)
            else:
                letter.reply.set_result(None)
