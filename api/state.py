"""What all handlers share: the engine, the configuration, and a few ways to read and answer."""

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from maxsimd.api.config import ServerConfig
from maxsimd.api.failures import ApiError
from maxsimd.api.metrics import ServerMetrics
from maxsimd.engine import Engine, EngineDeadError, EngineNotReadyError

T = TypeVar("T")
Phase = Literal["starting", "ok", "draining", "dead"]

# Bodies and answers beyond these are parsed and built in the thread pool, so that the event loop goes on.
LARGE_BODY = 64 * 1024
LARGE_ANSWER = 500


class ServerState:
    """Lives as long as the application. `draining` refuses new work while old work is finished."""

    def __init__(self, engine: Engine, config: ServerConfig, keys: frozenset[str]) -> None:
        self.engine = engine
        self.config = config
        self.keys = keys
        self.metrics = ServerMetrics(engine.metrics.registry)
        self.draining = False
        self._in_flight = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.metrics.in_flight.set_function(lambda: self._in_flight)

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.engine.model.name

    @property
    def is_ready(self) -> bool:
        return self.phase == "ok"

    @property
    def phase(self) -> Phase:
        """What the server is at; `ok` while it takes requests."""
        if self.engine.death is not None:
            return "dead"
        if self.draining:
            return "draining"
        return "ok" if self.engine.is_healthy else "starting"

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Counts a request from its arrival to its answer."""
        self._in_flight += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._quiet.set()

    async def until_quiet(self) -> None:
        """Returns when no request is in flight."""
        await self._quiet.wait()

    async def read(self, request: web.Request, kind: type[T]) -> T:
        """The request's body as a wire type. Raises what `failures` knows how to answer."""
        if not self.is_ready:
            if self.engine.death is not None:
                raise EngineDeadError(self.engine.death)
            raise EngineNotReadyError("the server is starting or shutting down")
        body = await request.read()
        if len(body) > LARGE_BODY:
            parsed = await self.engine.in_thread(lambda: msgspec.json.decode(body, type=kind))
        else:
            parsed = msgspec.json.decode(body, type=kind)
        self._check_model(getattr(parsed, "model", None))
        return parsed

    async def answer(self, response: Any, items: int = 0) -> web.Response:
        """A JSON response; `items` says how large it is."""
        if items > LARGE_ANSWER:
            body = await self.engine.in_thread(lambda: msgspec.json.encode(response))
        else:
            body = msgspec.json.encode(response)
        return web.Response(body=body, content_type="application/json")

    def check_count(self, count: int, param: str) -> None:
        most = self.config.max_documents
        if count > most:
            message = (
                f"{param} has {count} entries, but at most {most} are taken at a time; send them in parts"
            )
            raise ApiError(413, "RequestTooLargeError", message, param)

    def _check_model(self, name: str | None) -> None:
        if name and name not in (self.model_name, self.engine.model.name):
            raise ApiError(404, "NotFoundError", f"The model `{name}` does not exist.", "model")


STATE = web.AppKey("state", ServerState)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())
