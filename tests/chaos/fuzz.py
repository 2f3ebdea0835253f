"""Strange requests to a real server: none costs a crash, a 5xx, a long wait, a standstill of the event
loop, or more memory than its bytes justify."""

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.chaos.options import Options
from tests.chaos.pool import Texts
from tests.chaos.running import Running, running
from tests.chaos.strange import Strange, requests
from tests.chaos.tables import percentile, table
from tests.chaos.traffic import error_mismatch

# The promises.
_SECONDS = 1.0
_TOKEN_FACTOR = 2
_SMALL_BODY = 1 << 20
_STALL_SECONDS = 0.05
_MEMORY_BYTES, _MEMORY_FACTOR = 64 << 20, 20
# How long a request is given that need not be answered.
_PATIENCE_SECONDS, _LOST_SECONDS = 0.5, 60.0
_AT_A_TIME = 6
_EXAMPLES = 100
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Answer:
    """None came where `status` is 0. `seconds` are from the last byte sent to the last received."""

    status: int
    seconds: float
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Offender:
    what: str
    data: bytes


@dataclass(slots=True)
class Findings:
    statuses: Counter[int] = field(default_factory=Counter)
    refused_seconds: list[float] = field(default_factory=list)
    accepted_seconds: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    most_memory: int = 0
    offenders: list[Offender] = field(default_factory=list)

    def lines(self, folder: Path) -> str:
        rows: list[Sequence[object]] = [
            ("requests", self.statuses.total()),
            *(
                (f"answered {status}" if status else "not answered", n)
                for status, n in sorted(self.statuses.items())
            ),
            ("longest refusal, s", max(self.refused_seconds, default=None)),
            ("p99 of refusals, s", percentile(self.refused_seconds, 0.99)),
            ("longest accepted, s", max(self.accepted_seconds, default=None)),
            ("standstills over 50 ms", len(self.stalls)),
            ("longest, s", max(self.stalls, default=None)),
            ("most memory beyond idle, MiB", self.most_memory / (1 << 20)),
            ("offenders", len(self.offenders)),
        ]
        shown = []
        for number, offender in enumerate(self.offenders[:_SHOWN]):
            path = folder / f"{number}.bin"
            path.write_bytes(offender.data)
            shown.append(f"{offender.what}\n  {path}: {offender.data[:200]!r}")
        return "\n".join([table(rows), *shown])


class Fuzzer:
    """Sends batches to a server that is idle in between, and holds each answer to the promises."""

    def __init__(self, server: Running, loop: asyncio.AbstractEventLoop, tokens_per_second: float) -> None:
        self.findings = Findings()
        self._server, self._loop, self._speed = server, loop, tokens_per_second
        self._idle_bytes = server.resident_bytes

    def send(self, batch: Sequence[Strange]) -> None:
        """All at a time."""
        if self._server.process.poll() is not None:
            return
        self._server.forget_peak()
        answers: list[Answer] = self._loop.run_until_complete(self._all(batch))
        tokens = sum(_tokens(answer) for answer in answers)
        for strange, answer in zip(batch, answers, strict=True):
            self._check(strange, answer, tokens)
        whole = b"".join(strange.data for strange in batch)
        if self._server.process.poll() is not None:
            self._offend(f"the server ended with {self._server.process.returncode}", whole)
            return
        memory = self._server.peak_bytes - self._idle_bytes
        self.findings.most_memory = max(self.findings.most_memory, memory)
        if memory > _MEMORY_BYTES + _MEMORY_FACTOR * len(whole):
            self._offend(f"{memory >> 20} MiB of memory for {len(whole):,} bytes", whole)
        for stall in self._server.ask("stalls"):
            self.findings.stalls.append(stall["seconds"])
            what = f"a standstill of {stall['seconds']:.3f} s, {stall['cpu_seconds']:.3f} of it computing"
            self._offend(f"{what}:\n{stall['stack']}", whole)

    def _check(self, strange: Strange, answer: Answer, tokens: int) -> None:
        self.findings.statuses[answer.status] += 1
        status, seconds = answer.status, answer.seconds
        if status == 0:
            if strange.complete:
                self._offend(f"no answer within {seconds:.1f} s", strange.data)
            return
        limit = _SECONDS
        if status < 400:
            self.findings.accepted_seconds.append(seconds)
            limit += _TOKEN_FACTOR * tokens / self._speed
        else:
            self.findings.refused_seconds.append(seconds)
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
        self.findings.offenders.append(Offender(what, data))

    async def _all(self, batch: Sequence[Strange]) -> list[Answer]:
        return list(await asyncio.gather(*(_ask(self._server.port, strange) for strange in batch)))


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
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        if status >= 200:  # others say that the body may come
            break
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    length = 0 if method == "HEAD" or status in (204, 304) else int(headers.get("content-length", 0))
    return status, headers, await reader.readexactly(length)


def _tokens(answer: Answer) -> int:
    """As many as the answer says were run or read; where it does not say, as many as it may hold."""
    with suppress(ValueError):
        told: Any = json.loads(answer.body)
        if isinstance(told, dict):
            return int(told.get("usage", {}).get("prompt_tokens", told.get("count", 0)))
    return len(answer.body) // 4 if answer.status == 200 else 0


def measure_speed(url: str) -> float:
    """Tokens a second of requests that take some time, one after the other: the slower of several."""
    texts = Texts.draw(0)
    speeds = []
    for query in texts.queries[:5]:
        body = {
            "query": query,
            "documents": texts.documents[:300],
            "cache": "bypass",
            "return_documents": False,
        }
        started = time.monotonic()
        answer = httpx.post(url + "/rerank", json=body, timeout=300).raise_for_status().json()
        speeds.append(answer["usage"]["prompt_tokens"] / (time.monotonic() - started))
    return min(speeds[1:])


def fuzz(server: Running, seconds: float, first_seed: int) -> Findings:
    """Sends strange requests for that long."""
    speed = measure_speed(server.url)
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
    return fuzzer.findings


def run(options: Options) -> int:
    with running(
        options.checkpoint(), "--cache-mb", "0", "--max-body-mb", "8", "--log-level", "error"
    ) as server:
        findings = fuzz(server, options.seconds or 300, options.seed)
        folder = Path(tempfile.mkdtemp(prefix="maxsimd-fuzz-"))
        print(findings.lines(folder))
        has_errors = "Traceback" in server.log
        if has_errors:
            print(f"there are errors in the server's log:\n{server.log[-4000:]}")
    return 1 if findings.offenders or has_errors else 0
