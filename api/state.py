"""What all handlers share: the engine, the configuration, the keys, the metrics, and what is in flight."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from maxsimd.api.config import ServerConfig
from maxsimd.api.failures import ApiError
from maxsimd.api.held_bytes import BodyBudget
from maxsimd.api.keys import read_keys
from maxsimd.api.metrics import ServerMetrics
from maxsimd.engine import Engine, EngineDeadError, EngineNotReadyError

Phase = Literal["starting", "ok", "draining", "dead"]


class ServerState:
    """Lives as long as the server, which may start before its engine does. `draining` refuses new work while
    work in flight is finished. Raises ValueError where the configuration's file of keys has none."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.keys = read_keys(config)
        self.metrics = ServerMetrics(engine.metrics.registry)
        self.bodies = BodyBudget(config.max_bodies_mb * 1024 * 1024)
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
        """`ok` while the server takes requests; else why it does not."""
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

    def check_ready(self) -> None:
        """Refuses work that the server cannot take now."""
        if self.engine.death is not None:
            raise EngineDeadError(self.engine.death)
        if not self.is_ready:
            raise EngineNotReadyError("the server is starting or shutting down")

    def check_model(self, name: str | None) -> None:
        if name and name not in (self.model_name, self.engine.model.name):
            raise ApiError(404, "NotFoundError", f"The model `{name}` does not exist.", "model")
