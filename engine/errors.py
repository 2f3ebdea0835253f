"""The engine's errors. Messages say what to change."""

from collections.abc import Sequence
from typing import Literal, Self

# queue: the queue is full; wait: the wait is too long; timeout: longer than the request's timeout; rate: the
# tenant has used up a rate.
Refusal = Literal["queue", "wait", "timeout", "rate"]


class MaxsimdError(Exception):
    """The base of all errors that the engine raises."""


class ModelLoadError(MaxsimdError):
    """The model cannot be found, read or served."""


class InvalidRequestError(MaxsimdError):
    """The request itself is wrong; `param` names the argument or field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownDocumentsError(MaxsimdError):
    """Documents were named by `digests`, SHA-256 in hexadecimal, that the engine does not have."""

    def __init__(self, message: str, digests: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.digests = tuple(digests)

    @classmethod
    def of(cls, digests: Sequence[str]) -> Self:
        documents = "document is" if len(digests) == 1 else "documents are"
        message = f"{len(digests)} {documents} unknown here by digest; add the text with the same model and "
        return cls(message + "limits, or give it in the request", digests)


class QueueFullError(MaxsimdError):
    """The queue is too full for this request, or its tenant has used up its rate. The queue refuses nothing
    if `max_wait_seconds` is None, the default in Python. `retry_after` is in seconds."""

    # Unpickling gives the message alone, and then sets the attributes.
    def __init__(self, message: str, retry_after: float = 1.0, reason: Refusal = "queue") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class RequestTooLargeError(MaxsimdError):
    """The request is above `max_request_tokens`, or takes longer than its own timeout even alone."""


class RequestTimeoutError(MaxsimdError):
    """The request's timeout passed before its result was ready."""

    @classmethod
    def after(cls, seconds: float) -> Self:
        """The error of a request with this timeout."""
        return cls(f"not done within {seconds} seconds; allow more time or send fewer documents")


class RequestFailedError(MaxsimdError):
    """The model, or the caller's own `progress`, failed on this request; others were not affected. `value` is
    the index of the one value that could not be computed, if it is known."""

    def __init__(self, message: str, value: int | None = None) -> None:
        super().__init__(message)
        self.value = value


class EngineRunningError(MaxsimdError):
    """The engine runs already, or is being started or stopped."""


class EngineNotReadyError(MaxsimdError):
    """The engine is not started, or is draining."""


class EngineDeadError(MaxsimdError):
    """An actor or the device has failed, or is stuck; the engine must be started again."""


class UnknownModelError(InvalidRequestError):
    """There is no model of this name."""


class ModelDroppedError(EngineNotReadyError):
    """This model has been dropped; the others serve."""


class ModelFailedError(EngineDeadError):
    """This model could not be loaded, or has died; the others serve."""
