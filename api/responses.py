"""Answers as aiohttp sends them, as bytes where there is no request to answer, and what is told to those
whose bytes are no HTTP."""

import asyncio
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError, LineTooLong

from maxsimd.api.answer import Answer
from maxsimd.api.failures import ApiError, malformed

_SERVER = "maxsimd"
# Bytes of a request's first line, and of a header. They differ, so that errors tell which was too long.
LONGEST_LINE, LONGEST_HEADER, MOST_HEADERS = 8190, 16_380, 128
# Bytes that are written at a time where answers are written piece by piece.
PIECE = 64 * 1024
# What aiohttp says of a header that may stand only once.
_TWICE = re.compile(r"Duplicate '([A-Za-z-]{1,40})' header found\.")


def as_response(answer: Answer, request: web.BaseRequest | None = None) -> web.Response:
    """As the response to a request, if there is one that could be read."""
    headers = {**answer.headers, "Server": _SERVER}
    body: Any = answer.body
    if request is not None and request.secure and len(body) > PIECE:
        headers["Content-Length"] = str(len(body))
        body = _in_pieces(body)
    return web.Response(status=answer.status, headers=headers, body=body)


def as_stream(answer: Answer) -> web.StreamResponse:
    """The beginning of a response whose body is still to be made."""
    return web.StreamResponse(status=answer.status, headers={**answer.headers, "Server": _SERVER})


async def _in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """Behind TLS the event loop notices only between writes that a client does not read."""
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]
        await asyncio.sleep(0)


def as_bytes(answer: Answer) -> bytes:
    """An answer after which the connection is closed, for where no request has come of which aiohttp
    knows."""
    headers = {
        **answer.headers,
        "Server": _SERVER,
        "Content-Length": str(len(answer.body)),
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body


def malformed_request(error: HttpProcessingError | None) -> ApiError:
    """What to tell whose bytes are not HTTP/1.1, without repeating them."""
    if isinstance(error, LineTooLong):
        if error.args[1] == LONGEST_LINE:
            return malformed(414, f"the path and query are too long; at most {LONGEST_LINE} bytes are taken")
        return malformed(431, f"a header is too long; at most {LONGEST_HEADER} bytes are taken")
    if isinstance(error, BadHttpMethod) and error.message == "Received HTTPS traffic on an HTTP port":
        return malformed(400, "HTTP is spoken here, not HTTPS; use http://")
    if error is not None and error.message == "Too many headers received":
        return malformed(431, f"there are too many headers; at most {MOST_HEADERS} are taken")
    twice = _TWICE.fullmatch(error.message) if error is not None else None
    if twice:
        return malformed(400, f"there are two {twice[1]} headers; send one")
    return malformed(
        400, "this is not HTTP/1.1; check method, path, Host, Content-Length and Transfer-Encoding"
    )
