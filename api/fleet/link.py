"""One connection from a front to an engine: many questions at a time."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from maxsimd.api.fleet.address import Address, connect
from maxsimd.api.fleet.messages import (
    Arrived,
    Ask,
    Cancel,
    Question,
    Reply,
    decode_to_front,
    encode,
)
from maxsimd.engine.errors import InvalidRequestError

# Before each message stands its length, little-endian.
LENGTH_BYTES = 4


class LostError(Exception):
    """The engine's process died, or cannot be reached: what was asked may or may not have been done."""


class SilentError(LostError):
    """The engine's process is there and does not answer: what was asked may yet be done, in vain."""


class NotSentError(LostError):
    """It was gone before anything was sent: nothing has been done."""


@dataclass(slots=True)
class _Waiting:
    arrived: Callable[[Arrived], None] | None
    reply: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Link:
    """Connected when made by `open`, until the other side is gone. For one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, _Waiting] = {}
        self._numbered = 0
        self._is_lost = False
        self._lost_by: type[LostError] = LostError
        self._num_received = self._num_written = 0
        self._reading = asyncio.create_task(self._read(), name="maxsimd-link")

    @classmethod
    async def open(cls, address: Address) -> "Link":
        """Raises LostError where nobody listens."""
        try:
            return cls(*await connect(address))
        except OSError as error:
            raise LostError(str(error)) from error

    async def ask(self, question: Question, arrived: Callable[[Arrived], None] | None = None) -> Reply:
        """The answer to a question; `arrived` is called with what comes before it. Cancelling it cancels the
        work. Raises LostError."""
        if self._is_lost:
            raise NotSentError("the engine is gone")
        self._numbered += 1
        number = self._numbered
        self._waiting[number] = waiting = _Waiting(arrived)
        try:
            self._write(Ask(number, question))
            return await waiting.reply
        except asyncio.CancelledError:
            if not self._is_lost:
                self._write(Cancel(number))
            raise
        finally:
            del self._waiting[number]

    async def until_quiet(self) -> None:
        """Returns when all that was asked is answered, or the other side is gone."""
        while self._waiting and not self._is_lost:
            reply = next(iter(self._waiting.values())).reply
            await asyncio.wait([reply])  # where the other side is gone, it fails
            await asyncio.sleep(0)  # who has waited for it takes it

    async def until_lost(self) -> None:
        """Returns when the other side is gone."""
        await asyncio.wait({self._reading})

    async def close(self, error: type[LostError] = LostError) -> None:
        """Ends the connection: what was asked fails by this error."""
        self._lost_by = error
        # A peer that does not read needs nothing that is still unsent.
        self._writer.transport.abort()
        self._reading.cancel()
        await asyncio.wait({self._reading})

    def _write(self, message: Ask | Cancel) -> None:
        try:
            encoded = encode(message)
        except OverflowError:
            raise InvalidRequestError("a number is too large; give one of at most 64 bits") from None
        self._writer.write(len(encoded).to_bytes(LENGTH_BYTES, "little"))
        self._writer.write(encoded)
        self._num_written += LENGTH_BYTES + len(encoded)

    @property
    def num_moved_bytes(self) -> int:
        """Bytes that have come, and those that have gone: a large question may take long to send."""
        return self._num_received + self._num_written - self._writer.transport.get_write_buffer_size()

    async def _read(self) -> None:
        try:
            while True:
                length = int.from_bytes(await self._read_exactly(LENGTH_BYTES), "little")
                reply = decode_to_front(await self._read_exactly(length))
                waiting = self._waiting.get(reply.number)
                if waiting is None:
                    continue  # it was cancelled
                if isinstance(reply.answer, Arrived):
                    if waiting.arrived is not None:
                        waiting.arrived(reply.answer)
                elif not waiting.reply.done():
                    waiting.reply.set_result(reply)
        except (OSError, EOFError, msgspec.DecodeError):
            pass
        finally:
            self._is_lost = True
            self._writer.close()
            for waiting in self._waiting.values():
                if not waiting.reply.done():
                    waiting.reply.set_exception(self._lost_by("the engine is gone or does not answer"))

    async def _read_exactly(self, length: int) -> bytes:
        """Counts the bytes as they come, because a large message may be on its way for long. Raises EOFError
        at the end, and OSError."""
        pieces: list[bytes] = []
        while length:
            piece = await self._reader.read(length)
            if not piece:
                raise EOFError
            self._num_received += len(piece)
            length -= len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError at the end, and OSError."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    return await reader.readexactly(length)
