"""A process of clients that take their time: `python -m tests.chaos.slow PORT COUNT SECONDS`. Opens that
many connections, prints a line when all are open and what they have asked for is answered, and one of JSON
when the server has closed them, or has not within that many seconds."""

import asyncio
import json
import random
import resource
import socket
import sys
import time
from dataclasses import asdict, dataclass, field

from maxsimd.api.sockets import raise_descriptor_limit

_OTHER_DESCRIPTORS = 50
_AT_A_TIME = 50
# How often a client does something; tools that hold connections open do every 10 to 15 seconds.
_EVERY_SECONDS = 5.0
_HEAD = b"POST /rerank HTTP/1.1\r\nHost: x\r\n"
# Answered with more than fits into the system's buffers.
_LONG = json.dumps({"query": "q", "documents": ["word " * 1_000_000]}).encode()


@dataclass(frozen=True, slots=True)
class Kind:
    """What a client sends at first and every few seconds; the bytes it reads in a second, None for all."""

    share: float
    first: bytes
    drip: bytes = b""
    reads: int | None = None


# Those whose answers take the server some work come first.
KINDS = {
    "slow readers": Kind(0.01, _HEAD + b"Content-Length: %d\r\n\r\n" % len(_LONG) + _LONG, reads=100),
    "half headers": Kind(0.4, _HEAD + b"X-Slow: ", b"x"),
    "half bodies": Kind(0.3, _HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
    "idle": Kind(0.29, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"),
}


@dataclass(slots=True)
class Seen:
    """Of one kind: connections, those still open in the end, and seconds from opening to the server's
    closing."""

    opened: int = 0
    refused: int = 0
    left_open: int = 0
    seconds: list[float] = field(default_factory=list)


class Client:
    def __init__(self, kind: Kind, seen: Seen) -> None:
        self._kind, self._seen = kind, seen
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if kind.reads is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._opened = 0.0

    async def open(self, port: int, gate: asyncio.Semaphore) -> bool:
        """Until what it asks for is answered; whether it is connected."""
        loop = asyncio.get_running_loop()
        async with gate:
            try:
                await loop.sock_connect(self._socket, ("127.0.0.1", port))
                self._opened = time.monotonic()
                await loop.sock_sendall(self._socket, self._kind.first)
                if not self._kind.drip:
                    await loop.sock_recv(self._socket, 1)
            except OSError:
                self._seen.refused += 1
                return False
        self._seen.opened += 1
        self._seen.left_open += 1
        return True

    async def stay(self) -> None:
        """Until the server closes the connection."""
        await asyncio.sleep(random.uniform(0, _EVERY_SECONDS) if self._kind.drip else 0)
        try:
            while await self._read():
                pass
        except OSError:
            pass
        self._seen.left_open -= 1
        self._seen.seconds.append(time.monotonic() - self._opened)
        self._socket.close()

    async def _read(self) -> bytes:
        """What came, or is about to; nothing once the connection is closed."""
        loop = asyncio.get_running_loop()
        if self._kind.reads is not None:
            await asyncio.sleep(1)
            return await loop.sock_recv(self._socket, self._kind.reads)
        if not self._kind.drip:
            return await loop.sock_recv(self._socket, 1 << 16)
        try:
            async with asyncio.timeout(_EVERY_SECONDS):
                return await loop.sock_recv(self._socket, 1 << 16)
        except TimeoutError:
            await loop.sock_sendall(self._socket, self._kind.drip)
            return self._kind.drip


async def main(port: int, count: int, seconds: float) -> None:
    descriptors = raise_descriptor_limit()
    if descriptors != resource.RLIM_INFINITY:
        count = min(count, descriptors - _OTHER_DESCRIPTORS)
    seen = {name: Seen() for name in KINDS}
    clients = [
        Client(kind, seen[name]) for name, kind in KINDS.items() for _ in range(round(kind.share * count))
    ]
    gate = asyncio.Semaphore(_AT_A_TIME)
    opened = await asyncio.gather(*(client.open(port, gate) for client in clients))
    print("open", flush=True)
    staying = [
        asyncio.create_task(one.stay()) for one, is_open in zip(clients, opened, strict=True) if is_open
    ]
    await asyncio.wait(staying, timeout=seconds)
    print(json.dumps({name: asdict(one) for name, one in seen.items()}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
