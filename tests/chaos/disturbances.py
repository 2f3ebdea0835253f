"""What goes wrong while a server serves: each kind is done to it for a while, and is over again."""

import asyncio
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from maxsimd.engine.cache.database import FILE
from tests.chaos.client import send
from tests.chaos.crowds import Crowd
from tests.chaos.disks import Disk
from tests.chaos.leaving import leave_often
from tests.chaos.pool import Pool
from tests.chaos.running import Running
from tests.chaos.traffic import Ask, Outcome, Verdict, malformed, rerank
from tests.damage import DAMAGES

_DAMAGES = {
    "cache truncated": "truncated to half",
    "cache overwritten": "random bytes in the middle",
    "cache deleted": "file deleted",
}


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    begun: float
    over: float


class Disturber:
    """Does one thing after another to a server, and notes when each was over."""

    def __init__(self, server: Running, crowd: Crowd, pool: Pool, disk: Disk, draw: random.Random) -> None:
        self.faults: list[Fault] = []
        # What the requests came to that are part of a fault.
        self.verdicts: list[Verdict] = []
        self._server, self._crowd, self._pool, self._disk, self._draw = server, crowd, pool, disk, draw
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "client stands still": self._stop_client,
            "clients leave": self._leave,
            "steps fail": lambda: self._break_steps("failing"),
            "steps lack memory": lambda: self._break_steps("out_of_memory"),
            "poisoned texts": self._poison,
            "malformed bodies": self._malformed,
            "cache cleared": self._clear_cache,
            "disk full": self._fill_disk,
            "cache read-only": self._forbid,
            "cache replaced": self._replace,
            **{kind: self._damage(name) for kind, name in _DAMAGES.items()},
        }

    async def run(self, seconds: float, pause: float) -> None:
        """All kinds in random order, again and again, with a pause of about that long after each."""
        end = time.monotonic() + seconds
        while True:
            for kind in self._draw.sample(list(self._kinds), len(self._kinds)):
                await asyncio.sleep(self._draw.uniform(0.5, 1.5) * pause)
                if time.monotonic() > end:
                    return
                begun = time.monotonic()
                await self._kinds[kind]()
                self.faults.append(Fault(kind, begun, time.monotonic()))

    async def _stop_client(self) -> None:
        number = self._draw.randrange(len(self._crowd.processes))
        await self._crowd.stand_still(number, self._draw.choice([0.2, 1.0, 5.0]))

    async def _leave(self) -> None:
        def request(draw: random.Random) -> tuple[str, bytes]:
            ask = rerank(self._pool, draw, draw.randint(1, 50), options={"cache": "bypass"})
            return ask.path, ask.body

        await leave_often(self._server.port, 50, 25, request, self._draw.randrange(1 << 30))

    async def _break_steps(self, how: str) -> None:
        await self._set(how, self._draw.choice([0.1, 0.5, 0.9]))
        await asyncio.sleep(self._draw.uniform(0.5, 2))
        await self._set(how, 0.0)

    async def _set(self, how: str, probability: float) -> None:
        await asyncio.to_thread(self._server.ask, "set", **{how: probability})

    async def _poison(self) -> None:
        options = {"on_error": "report", "cache": "bypass"}
        await self._send([rerank(self._pool, self._draw, 100, 20, options) for _ in range(2)])

    async def _malformed(self) -> None:
        await self._send([malformed(self._pool, self._draw) for _ in range(30)])

    async def _send(self, asks: list[Ask]) -> None:
        async with aiohttp.ClientSession(self._server.url) as session:
            try:
                answers = await asyncio.gather(*(send(session, ask) for ask in asks))
            except aiohttp.ClientError as error:
                self.verdicts.append(Verdict(Outcome.LOST, repr(error)))
            else:
                self.verdicts += [verdict for _, verdict in answers]

    async def _clear_cache(self) -> None:
        async with aiohttp.ClientSession(self._server.url) as session, session.delete("/cache") as response:
            if response.status != 204:
                self.verdicts.append(Verdict(Outcome.WRONG, f"DELETE /cache: {response.status}"))

    async def _fill_disk(self) -> None:
        with self._disk.full(self._server):
            await asyncio.sleep(self._draw.uniform(0.5, 2))

    def _damage(self, name: str) -> Callable[[], Awaitable[None]]:
        async def damage() -> None:
            await self._until_there()
            with suppress(OSError):  # there was none, or no room
                DAMAGES[name](self._disk.folder)

        return damage

    async def _forbid(self) -> None:
        await self._until_there()
        with suppress(FileNotFoundError):  # a journal, gone again
            DAMAGES["read-only"](self._disk.folder)
        try:
            await asyncio.sleep(self._draw.uniform(0.5, 2))
        finally:
            self._disk.folder.chmod(0o755)
            for path in self._disk.folder.iterdir():
                with suppress(FileNotFoundError):
                    path.chmod(0o644)

    async def _replace(self) -> None:
        """What is not the server's own it leaves alone, until its owner takes it away."""
        await self._until_there()
        with suppress(OSError, sqlite3.Error):
            DAMAGES["file replaced by another program's"](self._disk.folder)
        await asyncio.sleep(self._draw.uniform(0.5, 2))
        (self._disk.folder / FILE).unlink(missing_ok=True)

    async def _until_there(self) -> None:
        """A cache that was removed is made anew within a second or two."""
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                while not (self._disk.folder / FILE).exists():
                    await asyncio.sleep(0.05)
