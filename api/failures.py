"""What clients are told when something is wrong: one shape, a status an error class."""

import math
import re

import msgspec
from aiohttp import web

from maxsimd.api.wire import ErrorBody, ErrorResponse
from maxsimd.engine import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
)


class ApiError(Exception):
    """An error that has its own place on the wire."""

    def __init__(
        self, status: int, kind: str, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.retry_after = status, kind, param, retry_after


def as_api_error(error: Exception) -> ApiError:
    """The wire's view of any exception. Unknown ones say nothing of their inside."""
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
            return ApiError(429, "QueueFullError", str(error), retry_after=error.retry_after)
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
        case web.HTTPRequestEntityTooLarge():
            message = "the body is too large; send fewer documents at a time, or raise --max-body-mb"
            return ApiError(413, "RequestTooLargeError", message)
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return ApiError(405, "MethodNotAllowedError", f"this route takes {allowed}")
        case web.HTTPNotFound():
            return ApiError(404, "NotFoundError", "there is no such route; see README for those there are")
        case web.HTTPException():
            return ApiError(error.status, "BadRequestError", error.reason)
        case _:
            return ApiError(
                500, "InternalServerError", "internal error; the log has it under this request's id"
            )


def error_response(error: ApiError) -> web.Response:
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    body = ErrorResponse(ErrorBody(str(error), error.kind, error.param, error.status))
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers=headers,
    )


def _describe(message: str) -> tuple[str, str | None]:
    """msgspec's message and the field it is about: `Expected ... - at `$.top_n``."""
    missing = re.search(r"missing required field `(\w+)`", message)
    if missing:
        return f"{missing[1]} is missing", missing[1]
    text, _, place = message.partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".")
    if not path:
        return f"the body is wrong: {text}", None
    return f"{path}: {text[0].lower()}{text[1:]}", re.split(r"[.\[]", path)[0]
