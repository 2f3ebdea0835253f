"""Strange requests to a real server: none costs a crash, a 5xx, a long wait, a standstill of the event
loop, or more memory than its bytes justify."""

import asyncio
import json
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.chaos.findings import Found, percentile
from tests.chaos.running import Running, running
from tests.chaos.strange import Strange, requests
from tests.chaos.traffic import Texts, error_mismatch

# The promises.
_SECONDS = 1.0
_TOKEN_FACTOR = 2
_SMALL_BODY = 1 << 20
_MEMORY_BYTES, _MEMORY_FACTOR = 64 << 20, 20
# How long a request is given that need not be answered.
_PATIENCE_SECONDS, _LOST_SECONDS = 0.5, 60.0
_AT_A_TIME = 6
_EXAMPLES = 100


@dataclass(frozen=True, slots=True)
class Answer:
    """None came where `status` is 0. `seconds` are from the last byte sent to the last received."""

    status: int
    seconds: float
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def tokens(self) -> int:
        """As many as it says were run or read; where it does not say, as many as it may hold."""
        with suppress(ValueError):
            told: Any = json.loads(self.body)
            if isinstance(told, dict):
                return int(told.get("usage", {}).get("prompt_tokens", told.get("count", 0)))
        return len(self.body) // 4 if self.status == 200 else 0


class Fuzzer:
    """Sends batches to a server that is idle in between, and holds each answer to the promises. Requests that
    break one are kept in a folder."""

    def __init__(self, server: Running, loop: asyncio.AbstractEventLoop, tokens_per_second: float) -> None:
        self._server, self._loop, self._speed = server, loop, tokens_per_second
        self._idle_bytes = server.resident_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="maxsimd-fuzz-"))
        self._statuses: Counter[int] = Counter()
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # of what was accepted, and refused
        self._stalls: list[float] = []
        self._most_memory = 0
        self._broken: list[str] = []

    def found(self) -> Found:
        rows = [
            ("requests", self._statuses.total()),
            *((f"answered {status}", number) for status, number in sorted(self._statuses.items())),
            ("longest refusal, s", max(self._seconds[False], default=None)),
            ("p99 of refusals, s", percentile(self._seconds[False], 0.99)),
            ("longest accepted, s", max(self._seconds[True], default=None)),
            ("standstills over 50 ms", len(self._stalls)),
            ("longest, s", max(self._stalls, default=None)),
            ("most memory beyond idle, MiB", self._most_memory / (1 << 20)),
        ]
        return Found([rows], self._broken)

    def send(self, batch: Sequence[Strange]) -> None:
        """All at a time."""
        if self._server.process.poll() is not None:
            return
        self._server.forget_peak()
        asking = (_ask(self._server.port, strange) for strange in batch)
        answers = self._loop.run_until_complete(_gathered(asking))
        tokens = sum(answer.tokens for answer in answers)
        for strange, answer in zip(batch, answers, strict=True):
            self._check(strange, answer, tokens)
        whole = b"".join(strange.data for strange in batch)
        if self._server.process.poll() is not None:
            self._offend(f"the server ended with {self._server.process.returncode}", whole)
            return
        memory = self._server.peak_bytes - self._idle_bytes
        self._most_memory = max(self._most_memory, memory)
        if memory > _MEMORY_BYTES + _MEMORY_FACTOR * len(whole):
            self._offend(f"{memory >> 20} MiB of memory for {len(whole):,} bytes", whole)
        for stall in self._server.ask("stalls"):
            self._stalls.append(stall["seconds"])
            what = f"a standstill of {stall['seconds']:.3f} s, {stall['cpu_seconds']:.3f} of it computing"
            self._offend(f"{what}:\n{stall['stack']}", whole)

    def _check(self, strange: Strange, answer: Answer, tokens: int) -> None:
        status, seconds = answer.status, answer.seconds
        self._statuses[status] += 1
        if status == 0:
            if strange.complete:
                self._offend(f"no answer within {seconds:.1f} s", strange.data)
            return
        self._seconds[status < 400].append(seconds)
        limit = _SECONDS + (_TOKEN_FACTOR * tokens / self._speed if status < 400 else 0)
        if seconds > limit and len(strange.data) < _SMALL_BODY:
            self._offend(f"status {status} after {seconds:.2f} s, more than {limit:.2f}", strange.data)
        # What asks for little time may be told that it has passed.
        if status >= 500 and not (status == 504 and b"timeout" in strange.data):
            self._offend(f"status {status}: {answer.body[:300]!r}", strange.data)
        if status >= 400 and strange.method != "HEAD" and strange.complete:
            wrong = error_mismatch(status, answer.headers, answer.body)
            if wrong is not None:
                self._offend(wrong, strange.data)

    def _offend(self, what: str, data: bytes) -> None:
        path = self._folder / f"{len(self._broken)}.bin"
        path.write_bytes(data)
        self._broken.append(f"{what}\n  {path}: {data[:200]!r}")


async def _gathered(asking: Any) -> list[Answer]:
    return list(await asyncio.gather(*asking))


async def _ask(port: int, strange: Strange) -> Answer:
    """Sends a request on a connection of its own. One that is not complete is given up soon."""
    patience = _LOST_SECONDS if strange.complete else _PATIENCE_SECONDS
    sent = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return Answer(0, time.monotonic() - sent)
    try:
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(patience):
                writer.write(strange.data)
                # A server that refuses a request at its headers need not read its body.
                with suppress(OSError):
                    await writer.drain()
                sent = time.monotonic()
                status, headers, body = await _answer(reader, strange.method)
                return Answer(status, time.monotonic() - sent, headers, body)
        return Answer(0, time.monotonic() - sent)
    finally:
        writer.transport.abort()


async def _answer(reader: asyncio.StreamReader, method: str) -> tuple[int, dict[str, str], bytes]:
    status = 0
    while status < 200:  # others say that the body may come
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    length = 0 if method == "HEAD" or status in (204, 304) else int(headers.get("content-length", 0))
    return status, headers, await reader.readexactly(length)


def _measure_speed(url: str) -> float:
    """Tokens a second of requests that take some time, one after the other: the slower of several."""
    texts = Texts.draw(0)
    body: dict[str, Any] = {"documents": texts.documents[:300], "cache": "bypass", "return_documents": False}
    speeds = []
    for query in texts.queries[:5]:
        started = time.monotonic()
        answer = httpx.post(url + "/rerank", json=body | {"query": query}, timeout=300).raise_for_status()
        speeds.append(answer.json()["usage"]["prompt_tokens"] / (time.monotonic() - started))
    return min(speeds[1:])


def fuzz(server: Running, seconds: float, first_seed: int) -> Found:
    """Sends strange requests for that long."""
    speed = _measure_speed(server.url)
    server.ask("watch stalls")
    end = time.monotonic() + seconds
    with asyncio.Runner() as runner:
        fuzzer = Fuzzer(server, runner.get_loop(), speed)
        number = first_seed
        while time.monotonic() < end and server.process.poll() is None:

            @seed(number)
            @settings(
                max_examples=_EXAMPLES,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(st.lists(requests(), min_size=1, max_size=_AT_A_TIME))
            def send(batch: list[Strange]) -> None:
                if time.monotonic() < end:
                    fuzzer.send(batch)

            send()
            number += 1
    return fuzzer.found()


def run(options: Namespace) -> Found:
    limits = ("--cache-mb", "0", "--max-body-mb", "8", "--log-level", "error")
    with running(options.model, *limits) as server:
        found = fuzz(server, options.seconds or 300, options.seed)
        if "Traceback" in server.log:
            found = Found(found.tables, [*found.broken, f"errors in the log:\n{server.log[-4000:]}"])
    return found
