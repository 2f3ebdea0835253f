"""Errors of an engine as data, and back: exceptions of one process mean nothing to another."""

import logging
import re
from typing import cast

import msgspec

from maxsimd.api.fleet.messages import Failed
from maxsimd.engine import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
    RequestTooLargeError,
)
from maxsimd.engine.errors import Refusal

log = logging.getLogger("maxsimd.fleet")

_KINDS: dict[str, type[Exception]] = {
    "invalid": InvalidRequestError,
    "full": QueueFullError,
    "too large": RequestTooLargeError,
    "timeout": RequestTimeoutError,
    "failed": RequestFailedError,
    "not ready": EngineNotReadyError,
    "dead": EngineDeadError,
}
# A document or text as the engine's messages name it.
_DOCUMENT = re.compile(r"\b(documents|text_pairs|input|texts)\[(\d+)\]")


def as_failed(error: Exception) -> Failed:
    """An error that an engine has raised. One that it does not raise on purpose is logged here."""
    match error:
        case InvalidRequestError():
            return Failed(kind="invalid", message=str(error), param=error.param)
        case QueueFullError():
            return Failed(kind="full", message=str(error), retry_after=error.retry_after, reason=error.reason)
    for kind, of_kind in _KINDS.items():
        if isinstance(error, of_kind):
            return Failed(kind=kind, message=str(error))
    log.exception("a request failed", exc_info=error)
    return Failed(kind="failed", message="the request failed inside of the engine; its log says why")


def as_error(failed: Failed) -> Exception:
    """The error as the caller of an engine would have got it."""
    if failed.kind == "invalid":
        return InvalidRequestError(failed.message, failed.param)
    if failed.kind == "full":
        reason = cast("Refusal", failed.reason or "queue")
        return QueueFullError(failed.message, failed.retry_after, reason)
    return _KINDS.get(failed.kind, RequestFailedError)(failed.message)


def renumbered(failed: Failed, indices: list[int]) -> Failed:
    """The same of a part of a request, whose document i is `indices[i]` of the whole."""
    return msgspec.structs.replace(failed, message=in_whole(failed.message, indices))


def in_whole(message: str, indices: list[int]) -> str:
    """A message about a part of a request, whose document i is `indices[i]` of the whole."""

    def whole(found: re.Match[str]) -> str:
        position = int(found[2])
        return f"{found[1]}[{indices[position]}]" if position < len(indices) else found[0]

    return _DOCUMENT.sub(whole, message, count=1)
