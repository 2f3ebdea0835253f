"""Answers of handlers: a status, headers and a body, whole or line by line. Errors have one shape, and a
status for each class."""

import functools
import gzip
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from maxsimd.api import wire
from maxsimd.api.logs import printable
from maxsimd.api.options import in_flags
from maxsimd.api.wire import ErrorBody, ErrorResponse
from maxsimd.engine import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnknownDocumentsError,
    Usage,
)
from maxsimd.engine.requests import Timings
from maxsimd.engine.workers import run_in_thread_if_large

# So many characters of a text are as much work as an item of an answer, a score or a number.
_CHARACTERS_AN_ITEM = 200

# gzip in Accept-Encoding, unless its weight is 0.
_TAKES_GZIP = re.compile(r"(?:\bgzip\b|\*)(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))", re.IGNORECASE)

# Answers are data: caches must not keep them, and browsers must not show them as pages.
_ALWAYS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_NO_CONTEXT = nullcontext()


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response without the headers that servers add themselves (Content-Length, Date, Server).
    While a body is still being made, `body` is its first part and `lines` has the others, which are sent
    `within` a context. The log gives `reason` for a refusal; it has no text of clients. `timings` say where
    the request's time went in the engine."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    lines: AsyncGenerator[bytes] | None = None
    within: AbstractContextManager[Any] = _NO_CONTEXT
    reason: str = ""
    timings: Timings | None = None

    def with_headers(self, **headers: str) -> "Answer":
        """Returns the answer with more headers; each `_` in a name becomes a `-`."""
        added = {name.replace("_", "-"): value for name, value in headers.items()}
        return replace(self, headers={**self.headers, **added})

    def with_timings(self, timings: Timings) -> "Answer":
        """Returns the answer with the request's times in the engine."""
        parts = ((name, getattr(timings, name) * 1e3) for name in ("queue", "tokenise", "model", "score"))
        header = ", ".join(f"{name};dur={ms:.1f}" for name, ms in parts)
        return replace(self.with_headers(server_timing=header), timings=timings)

    def with_warnings(self, warnings: Sequence[str] | UnsetType) -> "Answer":
        """Returns the answer with its warnings in a header: not every shape has a place for them."""
        return self.with_headers(x_maxsimd_warnings="; ".join(warnings)) if warnings else self

    def with_field_warnings(self, warnings: Sequence[str]) -> "Answer":
        """Returns the answer with these warnings in the header, unless its handler has set that."""
        return self if "x-maxsimd-warnings" in self.headers else self.with_warnings(warnings)

    def readable_with(self, accept_encoding: str) -> "Answer":
        """Returns the answer, decompressed if the client does not take gzip."""
        if "Content-Encoding" not in self.headers or _TAKES_GZIP.search(accept_encoding):
            return self
        headers = {name: value for name, value in self.headers.items() if name != "Content-Encoding"}
        return replace(self, headers=headers, body=_decompressed(self.body))

    def completed(self, request_id: str, seconds: float, more: Mapping[str, str]) -> "Answer":
        """Returns the answer with the headers that every answer has and with `more`."""
        said = {name.lower() for name in self.headers}
        always = {name: value for name, value in _ALWAYS.items() if name.lower() not in said}
        timing = ", ".join(
            filter(None, (self.headers.get("server-timing"), f"total;dur={seconds * 1e3:.1f}"))
        )
        own = {"x-request-id": request_id, "server-timing": timing}
        if "Vary" in self.headers and "Vary" in more:
            more = {**more, "Vary": f"{self.headers['Vary']}, {more['Vary']}"}
        return replace(self, headers={**always, **self.headers, **own, **more})


@functools.lru_cache(maxsize=4)
def _decompressed(page: bytes) -> bytes:
    """A page as it is without compression. That takes milliseconds, and nobody needs a key for pages."""
    return gzip.decompress(page)


async def wire_answer(build: Callable[[], Any], items: int, characters: int = 0) -> Answer:
    """Answers in JSON with what `build` returns, a wire type or a list of them. A thread builds and encodes
    it if it has many `items`, or `characters` in its texts. `build` must not use the engine, which may have
    died."""
    size = max(items, characters // _CHARACTERS_AN_ITEM)
    encoded = await run_in_thread_if_large(size, lambda: msgspec.json.encode(build()))
    return Answer(200, {"Content-Type": "application/json"}, encoded)


def json_page(page: Any, status: int = 200) -> Answer:
    """A JSON page for people and programs, with spaces."""
    encoded = msgspec.json.format(msgspec.json.encode(page), indent=0)
    return Answer(status, {"Content-Type": "application/json; charset=utf-8"}, encoded)


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


# Messages repeat no more than this of what a client has sent.
_LONGEST_MESSAGE, _LONGEST_PARAM, _LONGEST_NAME = 1_000, 100, 100


INTERNAL_ERROR = "internal error; the log has it under this request's id"
# The types of errors, by their status.
_BAD_REQUEST = "BadRequestError"
_KINDS = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "ModelLoadError",
    429: "QueueFullError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ApiError(Exception):
    """An error with its own status and message on the wire. `headers` are for its answer alone."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        retry_after: float | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
        unknown_digests: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.unknown_digests = unknown_digests
        self.status, self.param, self.kind = status, param, kind or _KINDS.get(status, _BAD_REQUEST)
        waits = {} if retry_after is None else {"Retry-After": str(math.ceil(retry_after))}
        self.headers = {**waits, **headers}


def as_api_error(error: Exception) -> ApiError:
    """Maps any exception to its form on the wire. Unexpected ones reveal nothing of the inside."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, str(error), error.param)
        case msgspec.ValidationError():
            return ApiError(400, *_describe_validation(str(error)))
        case msgspec.DecodeError():
            return ApiError(400, f"the body is not valid JSON: {error}")
        case QueueFullError():
            kind = "RateLimitError" if error.reason == "rate" else None
            return ApiError(429, in_flags(str(error)), retry_after=error.retry_after, kind=kind)
        case UnknownDocumentsError():
            kind = type(error).__name__
            return ApiError(409, str(error), "documents", kind=kind, unknown_digests=error.digests)
        case RequestTooLargeError():
            return ApiError(413, in_flags(str(error)))
        case RequestTimeoutError():
            return ApiError(504, str(error))
        case EngineNotReadyError():
            message = "the server is starting or shutting down; try again shortly"
            return ApiError(503, message, retry_after=5)
        case EngineDeadError():
            message = "the engine has died and the server must be restarted"
            return ApiError(503, message, retry_after=30)
        case RequestFailedError():
            return ApiError(500, str(error))
        case _:
            return ApiError(500, INTERNAL_ERROR)


def error_answer(error: ApiError) -> Answer:
    param = None if error.param is None else printable(error.param, _LONGEST_PARAM)
    message = printable(str(error), _LONGEST_MESSAGE)
    unknown = [*error.unknown_digests] or UNSET
    body = ErrorResponse(ErrorBody(message, error.kind, param, error.status, unknown), message)
    reason = error.kind if param is None else f"{error.kind}:{param}"
    headers = {"Content-Type": "application/json", **error.headers}
    return Answer(error.status, headers, msgspec.json.encode(body), reason=reason)


def _describe_validation(message: str) -> tuple[str, str | None]:
    """The message and field in the text of msgspec's error: `Expected ... - at `$.top_n``."""
    missing = re.search(r"missing required field `(\w+)`", message)
    if missing:
        within = re.search(r" - at `\$\.(.+)`$", message)
        field = f"{within[1]}.{missing[1]}" if within else missing[1]
        return f"{field} is missing", re.split(r"[.\[]", field)[0]
    # The last one, because the text may repeat what the client has sent.
    text, found, location = message.rpartition(" - at ")
    if not found:
        text, location = message, ""
    path = location.strip("`").removeprefix("$").removeprefix(".")
    if not path:
        return f"the body is wrong: {text}", None
    return f"{path}: {text[0].lower()}{text[1:]}", re.split(r"[.\[]", path)[0]


def no_such_model(name: str, served: Sequence[str]) -> ApiError:
    message = f"The model {quoted(name)} does not exist; served here: {names_of(served)}."
    return ApiError(404, message, "model")


def quoted(name: str) -> str:
    """A model's name as messages repeat it, truncated, because clients may send any."""
    return f"`{printable(name, _LONGEST_NAME)}`"


def names_of(served: Sequence[str]) -> str:
    """The names of models that are served, whole, so that a client can send them."""
    return ", ".join(f"`{printable(name, len(name))}`" for name in served)


class Sink(Protocol):
    """Receives an answer while it is made. Raises ConnectionError once the client has gone away."""

    async def begin(self, answer: Answer) -> None:
        """Sends the status and the headers."""

    async def send(self, part: bytes) -> None:
        """Sends a part of the body; waits while the client does not read."""

    async def end(self) -> None: ...


class WholeAnswer:
    """The sink of adapters that send answers as a whole."""

    def __init__(self) -> None:
        self._begun: Answer | None = None
        self._body = bytearray()

    async def begin(self, answer: Answer) -> None:
        self._begun = answer

    async def send(self, part: bytes) -> None:
        self._body += part

    async def end(self) -> None:
        pass

    def or_else(self, answer: Answer) -> Answer:
        """The answer that was sent here, or `answer` if none was."""
        return answer if self._begun is None else replace(self._begun, body=bytes(self._body))


class LineSender:
    """Sends one answer that has lines to a sink. `completed` adds the headers that every answer has."""

    def __init__(self, sink: Sink, completed: Callable[[Answer], Answer]) -> None:
        self._sink = sink
        self._completed = completed
        self.has_begun = False

    async def send(self, answer: Answer) -> None:
        assert answer.lines is not None
        with answer.within:
            async with aclosing(answer.lines) as lines:
                self.has_begun = True
                await self._sink.begin(self._completed(answer))
                await self._sink.send(answer.body)
                async for line in lines:
                    await self._sink.send(line)
        await self._sink.end()

    async def fail(self, failure: ApiError) -> None:
        """Sends the error as the last line, because the status has been sent."""
        await self._sink.send(error_answer(failure).body + b"\n")
        await self._sink.end()
