"""The web application: routes, and what surrounds every one of them."""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web

from maxsimd.api import classification, embedding, operating, scoring
from maxsimd.api.config import ServerConfig
from maxsimd.api.failures import ApiError, as_api_error, error_response
from maxsimd.api.state import STATE, ServerState
from maxsimd.engine import Engine

log = logging.getLogger("maxsimd.http")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# What load balancers ask must be answered without a key.
_OPEN_TO_ALL = frozenset({"/health", "/ready"})
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def build_app(engine: Engine, config: ServerConfig) -> web.Application:
    """The application around an engine, which need not be started yet."""
    app = web.Application(middlewares=[_surround], client_max_size=config.max_body_mb * 1024 * 1024)
    app[STATE] = ServerState(engine, config, _read_keys(config))
    for module in (scoring, embedding, classification, operating):
        app.add_routes(module.routes)
    app.cleanup_ctx.append(_watch_lag)
    return app


@web.middleware
async def _surround(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every request an id, a key check, one shape of errors, timing, a log line and its metrics."""
    state = request.app[STATE]
    started = time.perf_counter()
    given = request.headers.get("x-request-id", "")
    request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
    route = request.match_info.route.resource.canonical if request.match_info.route.resource else "unknown"
    status = 499
    try:
        with state.in_flight():
            response = await _answer(state, request, handler, request_id)
        status = response.status
    finally:
        # Without a response the client has gone away, which aiohttp tells by cancelling.
        seconds = time.perf_counter() - started
        state.metrics.requests.labels(route, str(status)).inc()
        state.metrics.seconds.labels(route).observe(seconds)
        level = logging.DEBUG if request.method == "GET" else logging.INFO
        log.log(
            level, "%s %s %d %.1f ms id=%s", request.method, request.path, status, seconds * 1e3, request_id
        )
    response.headers["x-request-id"] = request_id
    response.headers["server-timing"] = f"total;dur={seconds * 1e3:.1f}"
    if state.draining:
        response.force_close()
    return response


async def _answer(
    state: ServerState, request: web.Request, handler: Handler, request_id: str
) -> web.StreamResponse:
    try:
        _check_key(state, request)
        return await handler(request)
    except Exception as error:
        told = as_api_error(error)
        if told.status == 500:
            log.exception("request %s failed", request_id, exc_info=error)
        return error_response(told)


def _check_key(state: ServerState, request: web.Request) -> None:
    if not state.keys or request.path in _OPEN_TO_ALL:
        return
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    given = key.strip().encode()
    # Every key is compared, in constant time, so that timing tells nothing.
    matches = [hmac.compare_digest(given, known.encode()) for known in state.keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise ApiError(401, "AuthenticationError", "send a valid key as Authorization: Bearer KEY")


def _read_keys(config: ServerConfig) -> frozenset[str]:
    keys = set(config.api_key)
    if config.api_key_file is not None:
        lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
        keys |= {line.strip() for line in lines if line.strip()}
        if not keys:
            raise ValueError(f"{config.api_key_file} holds no key")
    return frozenset(keys)


async def _watch_lag(app: web.Application) -> AsyncIterator[None]:
    watcher = asyncio.create_task(app[STATE].metrics.watch_lag())
    yield
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
