"""The actor that has a model: one engine, asked by fronts over connections of their own."""

import asyncio
import logging
from contextlib import ExitStack
from typing import Any

from maxsimd.api.cluster.busy import Busy
from maxsimd.api.cluster.members import own_handle, own_host, own_rank, published, watch
from maxsimd.api.cluster.own_slot import OwnSlot
from maxsimd.api.config import ServerConfig
from maxsimd.api.fleet.door import Door
from maxsimd.api.fleet.engine_answers import EngineAnswers
from maxsimd.api.fleet.roster import Listed
from maxsimd.api.logs import set_up_logging
from maxsimd.api.process import (
    collect_when_quiet,
    garbage_left_alone,
    resident_bytes,
    share_heaps,
    switching_often,
)
from maxsimd.api.telemetry import DroppedEvents
from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.device.host import usable_cores
from maxsimd.engine.workers import take_short_slices

log = logging.getLogger("maxsimd.cluster")


class Scorer:
    """A replica on Ray Serve, which calls its methods. Its constructor loads the model, and raises
    ModelLoadError."""

    async def __init__(  # type: ignore[misc]
        self, engine_config: EngineConfig, server_config: ServerConfig
    ) -> None:
        set_up_logging(server_config.log_level, server_config.log_format)
        take_short_slices()
        share_heaps(usable_cores().threads)
        self._grace = server_config.grace_seconds
        self._door: Door | None = None
        self._slot = OwnSlot()
        self._loop = asyncio.get_running_loop()
        watch(own_handle(), self._scorers_changed)
        engine = self._engine = Engine(engine_config)
        engine.metrics.registry.register(DroppedEvents())
        await engine.start()
        self._stack = ExitStack()
        self._stack.enter_context(switching_often())
        self._stack.enter_context(garbage_left_alone())
        self._busy = Busy()
        self._tasks = [
            asyncio.create_task(collect_when_quiet(self._is_idle, resident_bytes)),
            asyncio.create_task(self._busy.watch(lambda: not self._is_idle())),
        ]
        self._door = Door(EngineAnswers(engine), lambda: _waiting_tokens(engine))
        self._address = await self._door.open_port(own_host())
        self._slot.choose(own_rank(), self._address)
        log.info("scorer %d is ready: %s", self._slot.number, engine.facts.how_it_runs)

    async def check_health(self) -> None:
        """Raises once the engine has died: Serve puts another replica in its place then."""
        if self._engine.death is not None:
            raise RuntimeError(self._engine.death)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Where this scorer listens, for fronts."""
        return published(self._address, self._slot.number)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Whose documents are cached here: those of this slot."""
        return {"slot": self._slot.number}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What waits here in tokens, how many tokens a second are run, and for what share of the time."""
        engine = self._engine
        return {
            "queued_tokens": engine.stats().waiting_tokens,
            "tokens_per_second": engine.tokens_per_second or 0.0,
            "busy": self._busy.share(),
        }

    async def __del__(self) -> None:
        """Ends once all fronts have left, to which Serve has said before that this one is leaving."""
        if self._door is None:
            return  # the model was not loaded
        try:
            async with asyncio.timeout(self._grace):
                await self._door.until_left()
        except TimeoutError:
            log.warning("what was not done within grace_seconds goes to other scorers")
        await self._door.close()
        for task in self._tasks:
            task.cancel()
        await self._engine.stop(grace=0)
        self._stack.close()

    def _scorers_changed(self, listed: list[Listed]) -> None:
        self._loop.call_soon_threadsafe(self._slot.set_listed, listed)

    def _is_idle(self) -> bool:
        return self._engine.is_healthy and self._engine.stats().requests == 0


def _waiting_tokens(engine: Engine) -> int:
    return engine.stats().waiting_tokens if engine.is_healthy else 0
