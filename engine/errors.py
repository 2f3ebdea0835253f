"""Every way in which the engine refuses or fails. Messages say what to change."""

from typing import Literal, Self

# queue: no room; wait: it would take too long; timeout: that for the request's own timeout; rate: the tenant
# has used up what it may use in a minute.
Refusal = Literal["queue", "wait", "timeout", "rate"]


class MaxsimdError(Exception):
    """The base of all errors that the engine raises on purpose."""


class ModelLoadError(MaxsimdError):
    """The model cannot be found, read or served."""


class InvalidRequestError(MaxsimdError):
    """The request itself is wrong; `param` names the argument or field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(MaxsimdError):
    """Too much waits already for this request to come in, or its tenant has used up its rate. The former is
    never raised if `max_wait_seconds` is None, as in Python by default. `retry_after` (seconds) is when it
    might come in, and `reason` one of those of `Refusal`."""

    def __init__(self, message: str, retry_after: float, reason: Refusal = "queue") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class RequestTooLargeError(MaxsimdError):
    """The request is dearer than one may be, or takes longer than its own timeout even alone."""


class RequestTimeoutError(MaxsimdError):
    """The request's own timeout passed before its result was there."""

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Of a request with a timeout of these seconds."""
        return cls(f"not done within {seconds} seconds; allow more time or send fewer documents")


class RequestFailedError(MaxsimdError):
    """The model, or the caller's own `progress`, failed on this request alone; others were not affected.
    `value` is the index of the value that is not finite, if that is why."""

    def __init__(self, message: str, value: int | None = None) -> None:
        super().__init__(message)
        self.value = value


class EngineRunningError(MaxsimdError):
    """The engine runs, or is being started, and so cannot be started."""


class EngineNotReadyError(MaxsimdError):
    """The engine is not started yet, or takes no more requests because it is draining."""


class EngineDeadError(MaxsimdError):
    """An actor or the device failed beyond repair, or is stuck; the engine must be started anew."""


class UnknownModelError(InvalidRequestError):
    """Among several models there is none of this name."""


class ModelDroppedError(EngineNotReadyError):
    """Among several models this one has been dropped; the others serve."""


class ModelFailedError(EngineDeadError):
    """Among several models this one could not be loaded, or has died; the others serve."""
