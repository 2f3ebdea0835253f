"""The answer to a request that fails: one shape for all errors, and a status for each class of them."""

import math
import re
from collections.abc import Iterable, Sequence

import msgspec

from maxsimd.api.answer import Answer
from maxsimd.api.flags import in_flags
from maxsimd.api.printable import printable
from maxsimd.api.wire import ErrorBody, ErrorResponse
from maxsimd.engine import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
    RequestTooLargeError,
)

# Messages repeat what a client has sent: no more of it than this.
_LONGEST_MESSAGE = 1_000
_LONGEST_PARAM = 100
# The encodings of bodies that are taken.
TAKEN_ENCODINGS = "gzip, deflate"


class ApiError(Exception):
    """An error with a status, a type and a message of its own on the wire."""

    def __init__(
        self, status: int, kind: str, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.retry_after = status, kind, param, retry_after


class WrongMethodError(ApiError):
    """A path that there is, asked with a method that it does not take; `allowed` has those that it does."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(sorted(allowed))
        super().__init__(405, "MethodNotAllowedError", f"this route takes {self.allowed}")


def as_api_error(error: Exception) -> ApiError:
    """How any exception looks on the wire. Unexpected ones reveal nothing of the inside."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, "BadRequestError", str(error), error.param)
        case msgspec.ValidationError():
            message, param = _describe(str(error))
            return ApiError(400, "BadRequestError", message, param)
        case msgspec.DecodeError():
            return ApiError(400, "BadRequestError", f"the body is not valid JSON: {error}")
        case QueueFullError():
            kind = "RateLimitError" if error.reason == "rate" else "QueueFullError"
            return ApiError(429, kind, str(error), retry_after=error.retry_after)
        case RequestTooLargeError():
            return ApiError(413, "RequestTooLargeError", in_flags(str(error)))
        case RequestTimeoutError():
            return ApiError(504, "TimeoutError", str(error))
        case EngineNotReadyError():
            message = "the server is starting or shutting down; try again shortly"
            return ApiError(503, "ServiceUnavailableError", message, retry_after=5)
        case EngineDeadError():
            message = "the engine has died and the server must be restarted"
            return ApiError(503, "ServiceUnavailableError", message, retry_after=30)
        case RequestFailedError():
            return ApiError(500, "InternalServerError", str(error))
        case _:
            return internal_error()


def error_answer(error: ApiError) -> Answer:
    headers = {"Content-Type": "application/json"}
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    if isinstance(error, WrongMethodError):
        headers["Allow"] = error.allowed
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 415:
        headers["Accept-Encoding"] = TAKEN_ENCODINGS
    param = None if error.param is None else printable(error.param, _LONGEST_PARAM)
    message = printable(str(error), _LONGEST_MESSAGE)
    body = ErrorResponse(ErrorBody(message, error.kind, param, error.status), message)
    reason = error.kind if param is None else f"{error.kind}:{param}"
    return Answer(error.status, headers, msgspec.json.encode(body), reason=reason)


def restarting() -> ApiError:
    message = "the engine has failed and is being restarted; send the request again shortly"
    return ApiError(503, "ServiceUnavailableError", message, retry_after=5)


def no_such_route() -> ApiError:
    return ApiError(404, "NotFoundError", "there is no such route; GET /docs has those there are")


def no_valid_key() -> ApiError:
    return ApiError(401, "AuthenticationError", "send a valid key as Authorization: Bearer KEY")


def malformed(status: int, what: str) -> ApiError:
    return ApiError(status, "BadRequestError", what)


def no_such_model(name: str, served: Sequence[str]) -> ApiError:
    shown = ", ".join(f"`{each}`" for each in served)
    message = f"The model `{printable(name, 100)}` does not exist; served here: {shown}."
    return ApiError(404, "NotFoundError", message, "model")


def model_is_ambiguous(name: str, called: Sequence[str]) -> ApiError:
    shown = ", ".join(f"`{each}`" for each in called)
    message = f"several models are `{printable(name, 100)}`; say which you mean by its name: {shown}"
    return ApiError(404, "NotFoundError", message, "model")


def model_is_loading(name: str) -> ApiError:
    message = f"the model `{in_printable_name(name)}` is being loaded; send the request again shortly"
    return ApiError(503, "ServiceUnavailableError", message, "model", retry_after=5)


def model_has_failed(name: str, reason: str, served: Sequence[str]) -> ApiError:
    message = f"the model `{in_printable_name(name)}` is not served: {in_flags(reason)}; {_others(served)}"
    return ApiError(503, "ServiceUnavailableError", message, "model", retry_after=30)


def model_is_dropped(name: str, served: Sequence[str]) -> ApiError:
    message = f"the model `{in_printable_name(name)}` has been dropped; {_others(served)}"
    return ApiError(404, "NotFoundError", message, "model")


def model_was_dropped_meanwhile(name: str) -> ApiError:
    message = f"the model `{in_printable_name(name)}` was dropped before the request was done"
    return ApiError(503, "ServiceUnavailableError", message, "model", retry_after=30)


def model_is_undecided(name: str, served: Sequence[str]) -> ApiError:
    message = (
        f"the request names no model, and may be for `{in_printable_name(name)}`, which could not be loaded; "
        f"say as `model` which you mean: {_others(served)}"
    )
    return ApiError(503, "ServiceUnavailableError", message, "model", retry_after=30)


def model_is_not_loadable(name: str) -> ApiError:
    message = (
        f"there is no model `{in_printable_name(name)}` to load; name one of the configuration, or one in "
        "the folder of --models-dir by its path there"
    )
    return ApiError(404, "NotFoundError", message, "name")


def in_printable_name(name: str) -> str:
    """A model's name as messages repeat it."""
    return printable(name, 100)


def _others(served: Sequence[str]) -> str:
    return "served here: " + (", ".join(f"`{each}`" for each in served) or "none")


def too_slow(what: str, option: str) -> ApiError:
    return ApiError(
        408, "RequestTimeoutError", f"the {what} took too long to arrive; send faster, or raise {option}"
    )


def too_many_connections() -> ApiError:
    message = "the server has as many connections as it takes; try again shortly, or raise --max-connections"
    return ApiError(503, "ServiceUnavailableError", message, retry_after=1)


def internal_error() -> ApiError:
    return ApiError(500, "InternalServerError", "internal error; the log has it under this request's id")


def body_too_large() -> ApiError:
    message = "the body is too large; send fewer documents at a time, or raise --max-body-mb"
    return ApiError(413, "RequestTooLargeError", message)


def too_many_bodies() -> ApiError:
    message = "other requests' bodies take the memory that there is for them; try again shortly"
    return ApiError(429, "QueueFullError", message, retry_after=1)


def too_many_entries(param: str, count: int, most: int) -> ApiError:
    message = f"{param} has {count} entries, but at most {most} are taken at a time; send them in parts"
    return ApiError(413, "RequestTooLargeError", message, param)


def too_many_containers(most: int) -> ApiError:
    message = f"the body has more than {most} arrays and objects; send fewer documents at a time"
    return ApiError(413, "RequestTooLargeError", message)


def too_many_strings(most: int) -> ApiError:
    message = (
        f"the body has more than {most} strings, names of fields included; send fewer documents at a time, "
        "or documents of fewer fields"
    )
    return ApiError(413, "RequestTooLargeError", message)


def too_many_values(most: int) -> ApiError:
    message = (
        f"the body has more than {most} values; send fewer token ids at a time, or raise --max-request-tokens"
    )
    return ApiError(413, "RequestTooLargeError", message)


def too_deep() -> ApiError:
    return ApiError(400, "BadRequestError", "the body has too many arrays or objects within each other")


def not_utf8() -> ApiError:
    return ApiError(400, "BadRequestError", "the body is UTF-16 or UTF-32, or no text; send JSON in UTF-8")


def body_not_unicode(reason: str) -> ApiError:
    return ApiError(400, "BadRequestError", f"the body is not valid JSON: a string is not UTF-8 ({reason})")


def unknown_encoding() -> ApiError:
    message = f"this Content-Encoding is not taken; use {TAKEN_ENCODINGS}, or none"
    return ApiError(415, "UnsupportedMediaTypeError", message)


def unreadable_body() -> ApiError:
    message = (
        "the body is not what its headers say, or not all of it; check Content-Encoding and Content-Length"
    )
    return ApiError(400, "BadRequestError", message)


def _describe(message: str) -> tuple[str, str | None]:
    """msgspec's message and the field it is about: `Expected ... - at `$.top_n``."""
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
