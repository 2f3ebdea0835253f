"""Where a process of a fleet listens for others: a Unix socket on one machine, a port between machines."""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

# Who connects to a port sends the secret first, of as many bytes, and has as many seconds for it.
_SECRET_BYTES, _SECRET_SECONDS = 32, 5.0
# A connection whose other machine is silent is given up by the system after about a minute: it asks after
# these seconds for the first time, then this often, and this many times.
_QUIET_SECONDS, _EVERY_SECONDS, _TIMES = 30, 10, 3

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in a folder that only its owner can enter."""

    path: str


@dataclass(frozen=True, slots=True)
class NetAddress:
    """A port that whoever has the `secret` (hexadecimal) may connect to."""

    host: str
    port: int
    secret: str


Address: TypeAlias = UnixAddress | NetAddress


async def connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError where nobody listens."""
    if isinstance(address, UnixAddress):
        return await asyncio.open_unix_connection(address.path)
    async with asyncio.timeout(_SECRET_SECONDS):
        reader, writer = await asyncio.open_connection(address.host, address.port)
    _watch(writer)
    writer.write(bytes.fromhex(address.secret))
    return reader, writer


async def listen_on_path(accept: Accept, path: str) -> asyncio.Server:
    """Raises OSError where it cannot listen."""
    return await asyncio.start_unix_server(accept, path)


async def listen_on_port(accept: Accept, host: str) -> tuple[asyncio.Server, NetAddress]:
    """On a free port, with a secret of its own. Raises OSError where it cannot listen."""
    secret = secrets.token_bytes(_SECRET_BYTES)

    async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_SECRET_SECONDS):
                given = await reader.readexactly(_SECRET_BYTES)
        except (OSError, EOFError):  # a timeout is an OSError
            given = b""
        if not hmac.compare_digest(given, secret):
            writer.close()
            return
        _watch(writer)
        await accept(reader, writer)

    server = await asyncio.start_server(let_in, host, 0)
    return server, NetAddress(host, server.sockets[0].getsockname()[1], secret.hex())


def _watch(writer: asyncio.StreamWriter) -> None:
    """Has the system notice when the other machine is gone without a word."""
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
