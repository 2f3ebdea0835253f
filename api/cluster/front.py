"""The actor that has no model: it reads requests, spreads them over scorers, and writes answers."""

import asyncio
import logging
from contextlib import ExitStack, suppress
from typing import Any

from ray.serve.handle import DeploymentHandle

from maxsimd.api.cluster.asgi import AsgiAdapter
from maxsimd.api.cluster.members import own_handle, own_host, own_rank, published, watch
from maxsimd.api.config import ServerConfig
from maxsimd.api.fleet.address import Address
from maxsimd.api.fleet.fleet_engine import FleetEngine
from maxsimd.api.fleet.front import FrontView
from maxsimd.api.fleet.limits import check_limits
from maxsimd.api.fleet.roster import Listed, Roster
from maxsimd.api.keys import ApiKeys
from maxsimd.api.logs import set_up_logging
from maxsimd.api.process import switching_often
from maxsimd.api.state import ServerState

log = logging.getLogger("maxsimd.cluster")

# A front that has found no scorer after these seconds serves anyway, and says that it is not ready. As long
# do requests wait for a scorer that takes the place of one that died.
_PATIENCE = 120.0


class Front:
    """A replica on Ray Serve, which calls its methods. Its constructor returns once there is a scorer, and
    raises SetupError."""

    async def __init__(  # type: ignore[misc]
        self,
        scorers: DeploymentHandle,
        most_scorers: int,
        server_config: ServerConfig,
        caches_by_tenant: bool = False,
    ) -> None:
        set_up_logging(server_config.log_level, server_config.log_format)
        ApiKeys(
            server_config,
            set_tenants=lambda tenants: check_limits(tenants, most_scorers),
            must_be_named=caches_by_tenant,
        )
        self._grace = server_config.grace_seconds
        self._roster = Roster(most=most_scorers, timeout=server_config.replica_timeout_seconds)
        self._engine = FleetEngine(self._roster, _PATIENCE, caches_by_tenant=caches_by_tenant)
        self._state = ServerState(self._engine, server_config)
        self._others: dict[int, Address] = {}
        self._is_listed = False
        self._ending: asyncio.TimerHandle | None = None
        self._view = FrontView(self._engine, own_rank, lambda: self._others)
        self._state.fleet = self._view
        self._stack = ExitStack()
        self._stack.enter_context(switching_often())
        self._loop = asyncio.get_running_loop()
        begun = self._loop.time()
        self._address = await self._view.door.open_port(own_host())
        watch(scorers, self._scorers_changed)
        watch(own_handle(), self._fronts_changed)
        self._starting = asyncio.create_task(self._engine.start())
        self._lag = asyncio.create_task(self._state.metrics.watch_lag())
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._starting), _PATIENCE)
        found = "has found scorers" if self._engine.is_healthy else "has found no scorer yet"
        log.info("front %d %s after %.1f s", own_rank(), found, self._loop.time() - begun)

    def __serve_build_asgi_app__(self) -> AsgiAdapter:
        return AsgiAdapter(self._state)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Where other fronts can ask this one."""
        return published(self._address, own_rank())

    async def record_routing_stats(self) -> dict[str, Any]:
        """Its number in /metrics."""
        return {"slot": own_rank()}

    async def __del__(self) -> None:
        """Ends, once nothing is in flight."""
        self._state.closing = True
        for task in (self._starting, self._lag):
            task.cancel()
        await self._engine.stop()
        await self._view.door.close()
        await self._state.media.close()
        if self._state.tracing is not None:
            await asyncio.to_thread(self._state.tracing.close)
        self._stack.close()

    def _scorers_changed(self, listed: list[Listed]) -> None:
        if not listed:
            return  # all leave, with this one: until they are gone they answer
        self._loop.call_soon_threadsafe(self._engine.set_listed, listed)

    def _fronts_changed(self, listed: list[Listed]) -> None:
        self._loop.call_soon_threadsafe(self._set_fronts, listed)

    def _set_fronts(self, listed: list[Listed]) -> None:
        self._others = {each.slot: each.address for each in listed if each.address != self._address}
        is_listed = len(self._others) < len(listed)
        if is_listed == self._is_listed:
            return
        self._is_listed = is_listed
        if self._ending is not None:
            self._ending.cancel()
        if not is_listed:
            # Ray asks nothing more of it, and waits for what is in flight before it calls __del__.
            self._ending = self._loop.call_later(self._grace, self._end_requests)

    def _end_requests(self) -> None:
        if unfinished := self._state.end_requests():
            log.warning("%d requests were not done in time", unfinished)
