"""Clients that leave at random moments: the server is afterwards as it was before."""

import asyncio
import random
import socket
import struct
from argparse import Namespace
from collections import Counter
from contextlib import suppress

from tests.chaos.findings import Found
from tests.chaos.running import Running, running
from tests.chaos.traffic import Pool, Texts, rerank

MOMENTS = ("while connecting", "in the headers", "in the body", "while waiting", "while reading")
_RESET = struct.pack("ii", 1, 0)
_AT_A_TIME = 50
# Threads, their memory and the allocator's are there after this many.
_WARM_UP = 0.2
_MOST_GROWTH = 0.02
# For connections, which end a little later, and for memory that is given back.
_REST_SECONDS = 2.0


async def _leave(port: int, path: str, body: bytes, draw: random.Random) -> str:
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


async def leave_often(server: Running, pool: Pool, count: int, seed: int) -> Counter[str]:
    moments: Counter[str] = Counter()
    left = iter(range(count))

    async def client(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        for _ in left:
            options = {"cache": draw.choice(["use", "bypass"])}
            ask = rerank(pool, draw, draw.randint(1, 100), options=options)
            moments[await _leave(server.port, ask.path, ask.body, draw)] += 1

    await asyncio.gather(*(client(number) for number in range(min(count, _AT_A_TIME))))
    return moments


async def disconnect(
    server: Running, pool: Pool, count: int, seed: int = 0, most_growth: float = _MOST_GROWTH
) -> Found:
    await leave_often(server, pool, int(_WARM_UP * count), seed + 1)
    server.settled()
    await asyncio.sleep(_REST_SECONDS)
    before, resident_before = server.state(), server.resident_bytes
    moments = await leave_often(server, pool, count, seed)
    after = server.settled(lambda state: state == before)
    await asyncio.sleep(_REST_SECONDS)
    growth = server.resident_bytes / resident_before - 1
    broken = [] if after == before else [f"the server is not as it was before: {before}, {after}"]
    if growth > most_growth:
        broken.append(f"memory grew by {100 * growth:.2f} %")
    seen = [
        ("", "before", "after"), ("descriptors", before.descriptors, after.descriptors),
        ("tasks", before.tasks, after.tasks),
        ("engine holds", before.held or "nothing", after.held or "nothing"),
        ("memory, MiB", resident_before / (1 << 20), server.resident_bytes / (1 << 20)),
    ]  # fmt: skip
    return Found([[("clients that left", moments.total()), *sorted(moments.items())], seen], broken)


def run(options: Namespace) -> Found:
    with running(options.model, "--log-level", "warning") as server:
        pool = Pool.ask(Texts.draw(options.seed), server.url)
        return asyncio.run(disconnect(server, pool, options.requests or 10_000, options.seed))
