"""What a handler answers: a status, headers and the body's bytes. Sending them is the adapter's business."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from maxsimd.api import wire
from maxsimd.engine import Usage
from maxsimd.engine.requests import Timings
from maxsimd.engine.workers import run_in_thread_if_large

# As many characters of a text are as much work as an item of an answer is, a score or a number.
_CHARACTERS_AN_ITEM = 200

# What every answer carries unless its handler says otherwise: answers are data, to be neither kept by caches
# nor taken for pages.
_ALWAYS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP response, but for what every server adds itself (Content-Length, Date, Server). With
    `lines` it is not complete yet: these are its body, as they come. `reason` is what the log says of an
    answer that refuses something; it holds no text of a client's. `timings` say
    where its request's time went in the engine."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    lines: AsyncIterator[bytes] | None = None
    reason: str = ""
    timings: Timings | None = None

    def with_headers(self, **headers: str) -> "Answer":
        """The same answer with more headers; each `_` in a name becomes a `-`."""
        added = {name.replace("_", "-"): value for name, value in headers.items()}
        return replace(self, headers={**self.headers, **added})

    def with_timings(self, timings: Timings) -> "Answer":
        """The same answer, saying where its request's time went in the engine."""
        parts = ((name, getattr(timings, name) * 1e3) for name in ("queue", "tokenise", "model", "score"))
        header = ", ".join(f"{name};dur={ms:.1f}" for name, ms in parts)
        return replace(self.with_headers(server_timing=header), timings=timings)

    def with_warnings(self, warnings: Sequence[str] | msgspec.UnsetType) -> "Answer":
        """The same answer with its warnings, if it has any, in a header too: not every shape has a place."""
        return self.with_headers(x_maxsimd_warnings="; ".join(warnings)) if warnings else self

    def with_field_warnings(self, warnings: Sequence[str]) -> "Answer":
        """The same answer with these warnings in the header, where no handler has put them there."""
        is_told = "x-maxsimd-warnings" in self.headers
        return self if is_told else self.with_warnings(warnings)

    def completed(self, request_id: str, seconds: float, more: Mapping[str, str]) -> "Answer":
        """The answer as it leaves, with the headers that every answer carries and with `more`."""
        said = {name.lower() for name in self.headers}
        always = {name: value for name, value in _ALWAYS.items() if name.lower() not in said}
        timing = ", ".join(
            filter(None, (self.headers.get("server-timing"), f"total;dur={seconds * 1e3:.1f}"))
        )
        own = {"x-request-id": request_id, "server-timing": timing}
        return replace(self, headers={**always, **self.headers, **own, **more})


async def wire_answer(build: Callable[[], Any], items: int, characters: int = 0) -> Answer:
    """As JSON what is built, a wire type or a list of them: beside the event loop where it has many `items`,
    or `characters` in its texts. It needs nothing of the engine, which may have died since."""
    size = max(items, characters // _CHARACTERS_AN_ITEM)
    encoded = await run_in_thread_if_large(size, lambda: msgspec.json.encode(build()))
    return Answer(200, {"Content-Type": "application/json"}, encoded)


def json_page(page: Any, status: int = 200) -> Answer:
    """A small page for those who run a server, as JSON that people read too."""
    return Answer(status, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(page).encode())


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def usage_of(usage: Usage) -> wire.Usage:
    """The engine's count of tokens in OpenAI's words. Nothing is generated: the total is the prompt's."""
    details = None
    if usage.cached_tokens:
        details = wire.TokensDetails(usage.cached_tokens, usage.cached_documents)
    return wire.Usage(usage.prompt_tokens, usage.prompt_tokens, details)
