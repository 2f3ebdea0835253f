"""Strange requests to a real server, as hypothesis draws them: HTTP, or nearly, with JSON in it, or nearly.
None costs a crash, a 5xx, a long wait, a standstill of the event loop, or memory beyond what it justifies."""

import asyncio
import base64
import json
import random
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import httpx
import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from maxsimd.api import handlers, wire
from maxsimd.api.handlers.handle import ROUTES
from tests.chaos.findings import Found, percentile
from tests.chaos.running import Running, running
from tests.chaos.traffic import Texts, error_mismatch, read_answer
from tests.unit.calling_handlers import GOOD

_SECONDS = 1.0
_TOKEN_FACTOR = 2
_SMALL_BODY = 1 << 20
_MEMORY_BYTES, _MEMORY_FACTOR = 64 << 20, 20
# Freed memory that a server keeps for its next requests: it returns what exceeds this; see api/process.py.
_KEPT_BYTES = 128 << 20
# How long a request is given that need not be answered.
_PATIENCE_SECONDS, _LOST_SECONDS = 0.5, 60.0
_AT_A_TIME = 6
_EXAMPLES = 100


@dataclass(frozen=True, slots=True)
class Strange:
    """A request's bytes. To one that is not `complete` a server may wait for more."""

    data: bytes
    complete: bool
    method: str = "POST"


_WIRE_TYPES = (
    *(wire, handlers.rerank, handlers.vendor_reranks, handlers.embeddings, handlers.vendor_embeddings),
    *(handlers.classification, handlers.tokens, handlers.tei),
)
_KINDS = [each for module in _WIRE_TYPES for each in vars(module).values() if isinstance(each, type)]
_STRUCTS = [kind for kind in _KINDS if issubclass(kind, msgspec.Struct)]
_FIELDS = sorted({name for struct in _STRUCTS for name in struct.__struct_encode_fields__})
_TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["", "a", "\ud800", "\0", "[MASK] [SEP]", "🙂" * 20, "e\u0301" * 30]),
    st.builds(lambda word, count: word * count, st.text(min_size=1, max_size=6), st.integers(1, 20_000)),
)
_NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0])
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=8),
        st.dictionaries(st.one_of(st.sampled_from(_FIELDS), st.text(max_size=8)), inner, max_size=5),
    ),
    max_leaves=20,
)
# The length of the served model's vectors, and two such vectors in float16.
_DIM = 32
_HALVES = base64.b64encode(b"\x00\x2e" * 2 * _DIM).decode()
_PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAADUlEQVR4nGP4z4AA/wEOAAH/OF9wGgAAAABJRU5ErkJggg=="
_URL = f"data:image/png;base64,{_PICTURE}"
_PARTS = [{"type": "text", "text": "a text"}, {"type": "image_url", "image_url": {"url": _URL}}]
_VECTORS = {"embedding": _HALVES, "dtype": "float16", "shape": [2, _DIM]}
# Each route with a body that it accepts, from this model or from another.
_USUAL: list[tuple[str, dict[str, Any]]] = [
    *((path, body) for (method, path), body in GOOD.items() if method == "POST"),
    ("/rerank", {"query": "how is a file read", "documents": ["one text", "another", "a third one"]}),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d"]}),
    ("/predict", {"inputs": [["a", "b"]]}),
    ("/rerank", {"query": "a", "documents": [_VECTORS]}),
    ("/score", {"queries": {"embedding": [[0.1] * _DIM]}, "documents": [{"embedding": [0.2] * _DIM}, "b"]}),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "a text"}]}),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": _PARTS}]}),
    ("/rerank", {"query": "a", "documents": [{"image": _PICTURE}, "b", {"text": "c", "image": _PICTURE}]}),
    ("/score", {"queries": {"image": _PICTURE}, "documents": ["b", {"content": _PARTS}], "explain": "maps"}),
    ("/embeddings", {"input": [_URL], "modality": "image"}),
    ("/v2/embed", {"images": [_URL], "input_type": "image"}),
    ("/v1/multimodalembeddings", {"inputs": [{"content": _PARTS}], "input_type": "document"}),
]
_LONGEST, _ONE = 9 << 20, st.sampled_from(_USUAL)


def _changed(usual: tuple[str, dict[str, Any]], changes: dict[str, Any], many: int) -> tuple[str, bytes]:
    path, body = usual
    repeated = {name: value * many if isinstance(value, list) else value for name, value in body.items()}
    return path, json.dumps(repeated | changes).encode()[:_LONGEST]


_FITTING = st.builds(
    _changed,
    _ONE,
    st.one_of(st.just({}), st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=2)),
    st.sampled_from([1, 1, 1, 1, 7, 100, 3000]),
)
_BODIES = st.one_of(
    st.builds(lambda value: json.dumps(value).encode()[:_LONGEST], _VALUES),
    st.builds(
        lambda opening, depth: b'{"query": "a", "documents": ' + opening * depth,
        st.sampled_from([b"[", b'{"a":', b'[{"text":', b"[["]),
        st.integers(1, 100_000),
    ),
    st.builds(
        lambda digits: b'{"query": "a", "documents": ["b"], "top_n": ' + b"9" * digits + b"}",
        st.integers(1, 9999),
    ),
    st.builds(
        lambda seed, size: random.Random(seed).randbytes(size),
        st.integers(0, 1 << 32),
        st.one_of(st.integers(0, 2000), st.integers(0, 900_000)),
    ),
    st.builds(lambda body, end: json.dumps(body[1])[:end].encode(), _ONE, st.integers(0, 60)),
    st.binary(max_size=300),
)
_NAMES = st.text("abcdefghijklmnopqrstuvwxyz-_!#$%&'*+.^`|~0123456789", min_size=1, max_size=20)
_NAMES |= st.sampled_from([
    "content-type", "content-encoding", "accept", "expect", "x-request-id", "origin", "range", "te",
    "authorization", "accept-encoding", "connection", "upgrade", "cookie", "x-forwarded-for",
])  # fmt: skip
_LATIN_1 = st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f")
_HEADER_VALUES = st.text(_LATIN_1, max_size=60) | st.sampled_from([
    "application/json", "text/plain", "gzip", "br", "deflate, gzip", "100-continue", "close", "websocket", "",
    "x" * 20_000, "Bearer x", "*", "bytes=0-1",
])  # fmt: skip
_ROUTES = st.sampled_from(sorted(ROUTES))
_PATHS = st.one_of(
    *(_ROUTES, _ROUTES),
    st.builds(lambda path, end: path + end, _ROUTES, st.sampled_from(["/", "?a=b", "%00", "//", "/.."])),
    st.builds(lambda raw: "/" + quote_from_bytes(raw, safe="/%?#&=;:@+$,"), st.binary(max_size=60)),
    st.builds(lambda count: "/" + "a" * count, st.integers(1, 20_000)),
)
_OTHERS = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"]
_METHODS = st.sampled_from(["POST"] * 12 + _OTHERS)


@st.composite
def requests(draw: st.DrawFn) -> Strange:
    method = draw(_METHODS)
    path, body = draw(st.one_of(_FITTING, _FITTING, st.tuples(_PATHS, _BODIES)))
    headers = draw(st.lists(st.tuples(_NAMES, _HEADER_VALUES), max_size=4))
    if draw(st.integers(0, 30)) == 0:
        headers *= 60
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers)]
    if draw(st.integers(0, 9)) == 0:
        lines.append("Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    else:
        lines.append(f"Content-Length: {len(body)}")
    data = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
    if draw(st.integers(0, 7)):
        return Strange(data, True, method)
    changed = bytearray(data)
    one = st.tuples(st.integers(0, len(data) - 1), st.integers(-1, 255))
    for position, byte in draw(st.lists(one, max_size=8)):
        changed[position : position + 1] = b"" if byte < 0 else bytes([byte])
    return Strange(bytes(changed), False, method)


@dataclass(frozen=True, slots=True)
class Answer:
    """None came where `status` is 0, and `lost` says how: the wait was over, or the connection ended.
    `seconds` are from the last byte sent to the last received."""

    status: int
    seconds: float
    lost: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def tokens(self) -> int:
        """The tokens that it says were run or read; where it does not say, as many as it may hold."""
        with suppress(ValueError):
            told: Any = json.loads(self.body)
            if isinstance(told, dict):
                return int(told.get("usage", {}).get("prompt_tokens", told.get("count", 0)))
        return len(self.body) // 4 if self.status == 200 else 0


class Fuzzer:
    """Sends batches to a server that is idle in between, and keeps requests that break a promise."""

    def __init__(self, server: Running, loop: asyncio.AbstractEventLoop, tokens_per_second: float) -> None:
        self._server, self._loop, self._speed = server, loop, tokens_per_second
        self._idle_bytes = server.resident_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="maxsimd-fuzz-"))
        self._statuses: Counter[int] = Counter()
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # of what was accepted, and refused
        self._stalls: list[float] = []
        self._most_memory = self._most_kept = 0
        self._broken: list[str] = []

    def found(self) -> Found:
        rows = [
            ("requests", self._statuses.total()),
            *(
                (f"answered {status}" if status else "without an answer", number)
                for status, number in sorted(self._statuses.items())
            ),
            ("longest refusal, s", max(self._seconds[False], default=None)),
            ("p99 of refusals, s", percentile(self._seconds[False], 0.99)),
            ("longest accepted, s", max(self._seconds[True], default=None)),
            ("standstills over 50 ms", len(self._stalls)),
            ("longest, s", max(self._stalls, default=None)),
            ("most memory for a batch, MiB", self._most_memory / (1 << 20)),
            ("most kept between batches, MiB", self._most_kept / (1 << 20)),
        ]
        return Found([rows], self._broken)

    def send(self, batch: Sequence[Strange]) -> None:
        if self._server.process.poll() is not None:
            return
        self._server.forget_peak()
        before = max(self._server.resident_bytes, self._idle_bytes)
        asking = (_ask(self._server.port, strange) for strange in batch)
        answers = self._loop.run_until_complete(_gathered(asking))
        tokens = sum(answer.tokens for answer in answers)
        for strange, answer in zip(batch, answers, strict=True):
            self._check(strange, answer, tokens)
        whole = b"".join(strange.data for strange in batch)
        if self._server.process.poll() is not None:
            self._offend(f"the server ended with {self._server.process.returncode}", whole)
            return
        memory, kept = self._server.peak_bytes - before, before - self._idle_bytes
        self._most_memory, self._most_kept = max(self._most_memory, memory), max(self._most_kept, kept)
        if memory > _MEMORY_BYTES + _MEMORY_FACTOR * len(whole) or kept > _KEPT_BYTES:
            self._offend(f"{memory >> 20} MiB for {len(whole):,} bytes, {kept >> 20} kept before", whole)
        for stall in self._server.ask("stalls"):
            self._stalls.append(stall["seconds"])
            what = f"a standstill of {stall['seconds']:.3f} s, {stall['cpu_seconds']:.3f} of it computing"
            self._offend(f"{what}:\n{stall['stack']}", whole)

    def _check(self, strange: Strange, answer: Answer, tokens: int) -> None:
        status, seconds = answer.status, answer.seconds
        self._statuses[status] += 1
        if status == 0:
            if strange.complete:
                self._offend(f"no answer after {seconds:.1f} s: {answer.lost}", strange.data)
            return
        self._seconds[status < 400].append(seconds)
        limit = _SECONDS + (_TOKEN_FACTOR * tokens / self._speed if status < 400 else 0)
        if seconds > limit and len(strange.data) < _SMALL_BODY:
            self._offend(f"status {status} after {seconds:.2f} s, more than {limit:.2f}", strange.data)
        # A request with a short timeout may be told that it has passed.
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


class _Received(asyncio.StreamReader):
    """Gives an answer that came before a reset, as a server sends one that has not read the whole request."""

    def set_exception(self, exc: Exception) -> None:
        self.feed_eof()


async def _ask(port: int, strange: Strange) -> Answer:
    """Sends a request on a connection of its own. One that is not complete is given up soon."""
    patience = _LOST_SECONDS if strange.complete else _PATIENCE_SECONDS
    sent = time.monotonic()
    reader = _Received()
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: protocol, "127.0.0.1", port)
    except OSError as error:
        return Answer(0, time.monotonic() - sent, f"no connection ({error!r})")
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        async with asyncio.timeout(patience):
            writer.write(strange.data)
            # A server that refuses a request at its headers need not read its body.
            with suppress(OSError):
                await writer.drain()
            sent = time.monotonic()
            status, headers, body = await read_answer(reader, strange.method)
            return Answer(status, time.monotonic() - sent, "", headers, body)
    except TimeoutError:
        lost = f"nothing came within {patience:g} s"
    except asyncio.IncompleteReadError as error:
        lost = f"the connection ended behind {len(error.partial)} bytes of an answer"
    finally:
        transport.abort()
    return Answer(0, time.monotonic() - sent, lost)


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
