"""Clients that leave at a moment when a server has something to do for them."""

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

MOMENTS = ("while connecting", "in the headers", "in the body", "while waiting", "while reading")
_RESET = struct.pack("ii", 1, 0)


async def leave(port: int, path: str, body: bytes, draw: random.Random) -> str:
    """Sends a request, or a part of one, and leaves, with or without a goodbye; returns the moment."""
    moment = draw.choice(MOMENTS)
    loop = asyncio.get_running_loop()
    with socket.socket() as client, suppress(OSError, TimeoutError):
        client.setblocking(False)
        if draw.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if moment == "while connecting":
            with suppress(BlockingIOError):
                client.connect(("127.0.0.1", port))
            return moment
        await loop.sock_connect(client, ("127.0.0.1", port))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        whole = head + body
        match moment:
            case "in the headers":
                whole = head[: draw.randrange(1, len(head))]
            case "in the body":
                whole = whole[: draw.randrange(len(head), len(whole))]
        async with asyncio.timeout(10):
            await loop.sock_sendall(client, whole)
            if moment == "while reading":
                await loop.sock_recv(client, draw.choice([1, 100, 1000]))
            else:
                await asyncio.sleep(draw.expovariate(100) if draw.random() < 0.8 else 0)
    return moment


async def leave_often(
    port: int, count: int, at_a_time: int, request: Callable[[random.Random], tuple[str, bytes]], seed: int
) -> Counter[str]:
    """Many of them, that many at a time; returns how many left at which moment."""
    moments: Counter[str] = Counter()
    left = iter(range(count))

    async def client(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        for _ in left:
            moments[await leave(port, *request(draw), draw)] += 1

    await asyncio.gather(*(client(number) for number in range(min(count, at_a_time))))
    return moments
