"""Where a process is asked by others: many questions at a time on each connection."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from maxsimd.api.fleet.address import NetAddress, listen_on_path, listen_on_port
from maxsimd.api.fleet.failures import as_failed
from maxsimd.api.fleet.link import LENGTH_BYTES, read_message
from maxsimd.api.fleet.messages import Answer, Ask, Question, Reply, decode_to_engine, encode

Send = Callable[[Answer], Awaitable[None]]


class Door:
    """Listens; `answer` is called with each question, and with what sends answers before its last.
    `queued_tokens` is asked of each reply. For one event loop."""

    def __init__(
        self, answer: Callable[[Question, Send], Awaitable[Answer]], queued_tokens: Callable[[], int]
    ) -> None:
        self._answer = answer
        self._queued_tokens = queued_tokens
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._left = asyncio.Event()
        self._left.set()

    async def open(self, path: str) -> None:
        """On a Unix socket. Raises OSError where it cannot listen."""
        self._server = await listen_on_path(self._accept, path)

    async def open_port(self, host: str) -> NetAddress:
        """On a free port; returns where that is. Raises OSError where it cannot listen."""
        self._server, address = await listen_on_port(self._accept, host)
        return address

    async def until_left(self) -> None:
        """Returns when nobody is connected."""
        await self._left.wait()

    async def close(self) -> None:
        """Ends all connections, and what was asked on them."""
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
                while True:
                    message = decode_to_engine(await read_message(reader))
                    if not isinstance(message, Ask):
                        if message.number in tasks:
                            tasks[message.number].cancel()
                        continue
                    tasks[message.number] = asyncio.create_task(self._reply(message, writer, tasks))
        finally:
            # The other side is gone: nobody waits for what it asked.
            for task in list(tasks.values()):
                task.cancel()
            writer.close()
            self._connections.discard(this)
            if not self._connections:
                self._left.set()

    async def _reply(
        self, ask: Ask, writer: asyncio.StreamWriter, tasks: dict[int, asyncio.Task[None]]
    ) -> None:
        async def send(answer: Answer) -> None:
            encoded = encode(Reply(ask.number, answer, self._queued_tokens()))
            writer.write(len(encoded).to_bytes(LENGTH_BYTES, "little"))
            writer.write(encoded)
            await writer.drain()

        try:
            with suppress(OSError):
                try:
                    await send(await self._answer(ask.question, send))
                except OSError:
                    raise
                except Exception as error:
                    await send(as_failed(error))
        finally:
            del tasks[ask.number]
