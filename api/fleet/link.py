"""Connections between processes: a front asks at a `Link`, an engine answers at its `Door`."""

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec

from maxsimd.api.fleet import messages as wire
from maxsimd.api.logs import SeldomLogger
from maxsimd.engine.errors import InvalidRequestError

# A client of a port first sends the secret, of this many bytes, within this many seconds.
_SECRET_BYTES, _SECRET_SECONDS = 32, 5.0
# TCP keepalive: first probe, interval, count. The system gives a silent peer up after a minute.
_QUIET_SECONDS, _EVERY_SECONDS, _TIMES = 30, 10, 3


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in a folder that only its owner can enter."""

    path: str


@dataclass(frozen=True, slots=True)
class NetAddress:
    """A port that only holders of the `secret` (hexadecimal) may connect to."""

    host: str
    port: int
    secret: str


Address: TypeAlias = UnixAddress | NetAddress


def _watch(writer: asyncio.StreamWriter) -> None:
    """Lets the system notice a peer that is gone without a word."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _QUIET_SECONDS),
        ("TCP_KEEPINTVL", _EVERY_SECONDS),
        ("TCP_KEEPCNT", _TIMES),
    ):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Bytes of the length before each message, little-endian.
LENGTH_BYTES = 4


class LostError(Exception):
    """The process died or cannot be reached: the question may or may not have been answered."""


class SilentError(LostError):
    """The process does not answer; it may yet work in vain."""


class OtherVersionError(LostError):
    """The process runs another version, so nothing can be asked."""


class NotSentError(LostError):
    """The process was gone before anything was sent."""


@dataclass(slots=True)
class _Waiting:
    arrived: Callable[[wire.Arrived], None] | None
    reply: asyncio.Future[wire.Reply] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Moved(NamedTuple):
    """Bytes that a link has received, sent, and not sent yet."""

    received: int
    sent: int
    unsent: int

    def shows_life(self, earlier: "Moved") -> bool:
        """Whether the peer has sent or read since. The system takes small messages for a peer that reads
        nothing, so sent bytes count only if earlier ones were waiting."""
        return self.received > earlier.received or (earlier.unsent > 0 and self.sent > earlier.sent)


class Link:
    """A connection with many questions at a time. For one event loop. Both sides first send their version."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, _Waiting] = {}
        self._numbered = 0
        self._is_lost = False
        self._lost_by: type[LostError] = LostError
        self._difference: str | None = None
        self._num_received = self._num_written = 0
        self._send(wire.greeting(wire.own_version()))
        self._reading = asyncio.create_task(self._read_all(), name="maxsimd-link")

    @classmethod
    async def open(cls, address: Address) -> "Link":
        """Raises LostError."""
        try:
            if isinstance(address, UnixAddress):
                return cls(*await asyncio.open_unix_connection(address.path))
            async with asyncio.timeout(_SECRET_SECONDS):
                reader, writer = await asyncio.open_connection(address.host, address.port)
            _watch(writer)
            writer.write(bytes.fromhex(address.secret))
            return cls(reader, writer)
        except OSError as error:
            raise LostError(str(error)) from error

    async def ask(
        self, question: wire.Question, arrived: Callable[[wire.Arrived], None] | None = None
    ) -> wire.Reply:
        """Returns the reply; `arrived` gets answers before the last. Cancelling cancels the work. Raises
        LostError."""
        if self._difference is not None:
            raise OtherVersionError(self._difference)
        if self._is_lost:
            raise NotSentError("the engine is gone")
        self._numbered += 1
        number = self._numbered
        self._waiting[number] = waiting = _Waiting(arrived)
        try:
            self._send(wire.encode(wire.Ask(number, question)))
            return await waiting.reply
        except OverflowError:
            raise InvalidRequestError("a number is too large; give one of at most 64 bits") from None
        except asyncio.CancelledError:
            if not self._is_lost:
                self._send(wire.encode(wire.Cancel(number)))
            raise
        finally:
            del self._waiting[number]

    async def until_quiet(self) -> None:
        """Returns when all is answered, or the peer is gone."""
        while self._waiting and not self._is_lost:
            reply = next(iter(self._waiting.values())).reply
            await asyncio.wait([reply])  # where the other side is gone, it fails
            await asyncio.sleep(0)  # who has waited for it takes it

    async def until_lost(self) -> None:
        await asyncio.wait({self._reading})

    async def close(self, error: type[LostError] = LostError) -> None:
        """Closes; open questions fail with `error`."""
        self._lost_by = error
        # A peer that does not read needs nothing that is still unsent.
        self._writer.transport.abort()
        self._reading.cancel()
        await asyncio.wait({self._reading})

    def _send(self, message: bytes) -> None:
        _write(self._writer, message)
        self._num_written += LENGTH_BYTES + len(message)

    @property
    def moved(self) -> Moved:
        unsent = self._writer.transport.get_write_buffer_size()
        return Moved(self._num_received, self._num_written - unsent, unsent)

    async def _read_all(self) -> None:
        try:
            self._difference = wire.difference(await self._read_message())
            while self._difference is None:
                reply = wire.decode_to_front(await self._read_message())
                waiting = self._waiting.get(reply.number)
                if waiting is None:
                    continue  # it was cancelled
                if isinstance(reply.answer, wire.Arrived):
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
                    waiting.reply.set_exception(self._loss())

    def _loss(self) -> LostError:
        if self._difference is not None:
            return OtherVersionError(self._difference)
        return self._lost_by("the engine is gone or does not answer")

    async def _read_message(self) -> bytes:
        return await self._read(int.from_bytes(await self._read(LENGTH_BYTES), "little"))

    async def _read(self, length: int) -> bytes:
        """Counts bytes as they come, because large messages take long. Raises EOFError and OSError."""
        pieces: list[bytes] = []
        while length:
            piece = await self._reader.read(length)
            if not piece:
                raise EOFError
            self._num_received += len(piece)
            length -= len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(LENGTH_BYTES, "little"))
    writer.write(message)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError at the end, and OSError."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    return await reader.readexactly(length)


Send = Callable[[wire.Answer], Awaitable[None]]


class Door:
    """Listens, and calls `answer` with each question and a function that sends answers before the last. Each
    reply has `queued_tokens`. For one event loop."""

    def __init__(
        self,
        answer: Callable[[wire.Question, Send], Awaitable[wire.Answer]],
        queued_tokens: Callable[[], int],
    ) -> None:
        self._answer = answer
        self._queued_tokens = queued_tokens
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._left = asyncio.Event()
        self._left.set()
        self._refused = SeldomLogger(logging.getLogger("maxsimd.fleet"))

    async def open(self, path: str) -> None:
        """Raises OSError."""
        self._server = await asyncio.start_unix_server(self._accept, path)

    async def open_port(self, host: str) -> NetAddress:
        """Listens on a free port with a secret of its own. Raises OSError."""
        secret = secrets.token_bytes(_SECRET_BYTES)

        async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            given = b""
            with suppress(OSError, EOFError):  # a timeout is an OSError
                async with asyncio.timeout(_SECRET_SECONDS):
                    given = await reader.readexactly(_SECRET_BYTES)
            if not hmac.compare_digest(given, secret):
                writer.close()
                return
            _watch(writer)
            await self._accept(reader, writer)

        self._server = await asyncio.start_server(let_in, host, 0)
        return NetAddress(host, self._server.sockets[0].getsockname()[1], secret.hex())

    async def until_left(self) -> None:
        """Returns when nobody is connected."""
        await self._left.wait()

    async def close(self) -> None:
        """Closes all connections and cancels their questions."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._connections.add(this)
        self._left.clear()
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            with suppress(OSError, EOFError, msgspec.DecodeError, asyncio.CancelledError):
                _write(writer, wire.greeting(wire.own_version()))
                different = wire.difference(await read_message(reader))
                if different is not None:
                    self._refused.warning("a front that asks is refused: %s", different)
                while different is None:
                    message = wire.decode_to_engine(await read_message(reader))
                    if isinstance(message, wire.Ask):
                        self._begin(message, writer, tasks)
                    elif message.number in tasks:
                        tasks[message.number].cancel()
        finally:
            # The peer is gone: nobody waits for answers.
            for task in list(tasks.values()):
                task.cancel()
            writer.close()
            self._connections.discard(this)
            if not self._connections:
                self._left.set()

    def _begin(
        self, ask: wire.Ask, writer: asyncio.StreamWriter, tasks: dict[int, asyncio.Task[None]]
    ) -> None:
        task = tasks[ask.number] = asyncio.create_task(self._reply(ask, writer))
        # A task that is cancelled before it begins runs none of its code.
        task.add_done_callback(lambda _: tasks.pop(ask.number))

    async def _reply(self, ask: wire.Ask, writer: asyncio.StreamWriter) -> None:
        async def send(answer: wire.Answer) -> None:
            _write(writer, wire.encode(wire.Reply(ask.number, answer, self._queued_tokens())))
            with suppress(OSError):  # the peer is gone, and all of its questions end
                await writer.drain()

        try:
            await send(await self._answer(ask.question, send))
        except Exception as error:
            await send(wire.as_failed(error))
