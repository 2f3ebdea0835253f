"""An application on Ray Serve: `import_path: maxsimd.api.cluster.serve:app_builder`."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from maxsimd.api.cluster.asgi import AsgiAdapter
from maxsimd.api.cluster.config import AppConfig, ClusterConfig
from maxsimd.api.cluster.router import Published, watchers
from maxsimd.api.cluster.scaling import Busy, OwnSlot, QueuedTokensPolicy
from maxsimd.api.config import ServerConfig
from maxsimd.api.fleet.engine_answers import EngineAnswers
from maxsimd.api.fleet.fleet_engine import FleetEngine, FrontView, check_limits
from maxsimd.api.fleet.link import Address, Door, NetAddress
from maxsimd.api.fleet.roster import Listed, Roster
from maxsimd.api.handlers import watch as watch_beside
from maxsimd.api.keys import ApiKeys
from maxsimd.api.logs import set_up_logging
from maxsimd.api.process import (
    collect_when_quiet,
    frequent_thread_switches,
    postponed_garbage_collection,
    resident_bytes,
    share_heaps,
)
from maxsimd.api.state import DroppedEvents, ServerState
from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.device.host import usable_cores
from maxsimd.engine.workers import take_short_slices


def watch(handle: DeploymentHandle, changed: Callable[[list[Listed]], None]) -> None:
    """Calls a function with all replicas of a deployment, now and on each change, from any thread."""

    def published(replicas: Published) -> None:
        ready = [each for each in replicas if "secret" in each]
        addresses = [NetAddress(each["host"], each["port"], each["secret"]) for each in ready]
        changed([Listed(each["slot"], address) for each, address in zip(ready, addresses, strict=True)])

    deployment = handle.deployment_id
    watchers.add((deployment.app_name, deployment.name), published)
    if not handle.is_initialized:
        handle._init()  # a router begins with the first call otherwise


def own_handle() -> DeploymentHandle:
    """This replica's deployment."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


def own_rank() -> int:
    """This replica's rank among its deployment's. It changes when another replica leaves."""
    return int(serve.get_replica_context().rank.rank)


# Seconds that a starting front waits for a scorer before it serves anyway, not ready; and that requests wait
# for a replacement.
_PATIENCE = 120.0


class Front:
    """A replica without a model: reads requests, spreads them over scorers and writes answers. Serve calls
    its methods. Its constructor returns once there is a scorer. Raises SetupError."""

    async def __init__(  # type: ignore[misc]
        self,
        scorers: DeploymentHandle,
        most_scorers: int,
        server_config: ServerConfig,
        caches_by_tenant: bool,
        secret: bytes,
    ) -> None:
        set_up_logging(server_config.log_level, server_config.log_format)
        ApiKeys(
            server_config,
            set_tenants=lambda tenants: check_limits(tenants, most_scorers),
            must_be_named=caches_by_tenant,
        )
        self._grace = server_config.grace_seconds
        timeout = server_config.replica_timeout_seconds
        self._roster = Roster(most=most_scorers, timeout=timeout, is_alone=False)
        self._engine = FleetEngine(self._roster, _PATIENCE, caches_by_tenant=caches_by_tenant)
        self._others: dict[int, Address] = {}
        self._is_listed = False
        self._ending: asyncio.TimerHandle | None = None
        self._view = FrontView(self._engine, own_rank, lambda: self._others, secret)
        self._state = ServerState(self._engine, server_config, self._view)
        self._stack = ExitStack()
        self._stack.enter_context(frequent_thread_switches())
        self._loop = asyncio.get_running_loop()
        begun = self._loop.time()
        self._address = await self._view.door.open_port(str(ray.util.get_node_ip_address()))
        watch(scorers, self._scorers_changed)
        watch(own_handle(), self._fronts_changed)
        self._starting = asyncio.create_task(self._engine.start())
        self._watching = asyncio.create_task(watch_beside(self._state))
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._starting), _PATIENCE)
        found = "has found scorers" if self._engine.is_healthy else "has found no scorer yet"
        log.info("front %d %s after %.1f s", own_rank(), found, self._loop.time() - begun)

    def __serve_build_asgi_app__(self) -> AsgiAdapter:
        return AsgiAdapter(self._state)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """The address for other fronts."""
        return {**asdict(self._address), "slot": own_rank()}

    async def record_routing_stats(self) -> dict[str, Any]:
        return {"slot": own_rank()}

    async def __del__(self) -> None:
        """Ends, once nothing is in flight."""
        self._state.closing = True
        for task in (self._starting, self._watching):
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
            # Ray sends no more requests, and calls __del__ when those in flight are done.
            self._ending = self._loop.call_later(self._grace, self._end_requests)

    def _end_requests(self) -> None:
        if unfinished := self._state.end_requests():
            log.warning("%d requests did not finish in time", unfinished)


log = logging.getLogger("maxsimd.cluster")


class Scorer:
    """A replica with a model: one engine, which fronts connect to. Serve calls its methods. Its constructor
    raises ModelLoadError."""

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
        self._stack.enter_context(frequent_thread_switches())
        self._stack.enter_context(postponed_garbage_collection())
        self._busy = Busy()
        answers = EngineAnswers(engine)
        self._tasks = [
            asyncio.create_task(collect_when_quiet(answers.is_idle, resident_bytes)),
            asyncio.create_task(self._busy.watch(lambda: not answers.is_idle())),
        ]
        self._door = Door(answers, answers.queued_tokens)
        self._address = await self._door.open_port(str(ray.util.get_node_ip_address()))
        self._slot.choose(own_rank(), self._address)
        log.info("scorer %d is ready: %s", self._slot.number, engine.facts.how_it_runs)

    async def check_health(self) -> None:
        """Raises once the engine has died: Serve then replaces the replica."""
        if self._engine.death is not None:
            raise RuntimeError(self._engine.death)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """The address for fronts."""
        return {**asdict(self._address), "slot": self._slot.number}

    async def record_routing_stats(self) -> dict[str, Any]:
        return {"slot": self._slot.number}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Queue in tokens, speed in tokens/s and share of busy time."""
        engine = self._engine
        return {
            "queued_tokens": engine.stats().waiting_tokens,
            "tokens_per_second": engine.tokens_per_second or 0.0,
            "busy": self._busy.share(),
        }

    async def __del__(self) -> None:
        """Ends once all fronts have left; Serve has told them."""
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


# Serve refuses nothing: engines do, by tokens.
_MOST_REQUESTS = 100_000
# Seconds beyond its grace that a replica may take to end.
_MARGIN_SECONDS = 10.0
_HEALTH_SECONDS = 2.0
# Seconds between questions for a replica's slot.
_SLOT_SECONDS = 5.0
# Seconds between reports, averaged over how many, and delays before scaling up and down: each change moves
# documents from cache to cache.
_LOOK_SECONDS, _LOOK_BACK_SECONDS = 2.0, 6.0
_MORE_AFTER_SECONDS, _FEWER_AFTER_SECONDS = 10.0, 600.0


def app_builder(args: dict[str, Any]) -> Application:
    """The application for the `args` of `AppConfig.of`. Raises ValueError."""
    config = AppConfig.of(args)
    cluster, server = config.cluster, config.server
    ends = {
        "graceful_shutdown_timeout_s": server.grace_seconds + _MARGIN_SECONDS,
        "health_check_period_s": _HEALTH_SECONDS,
        "max_ongoing_requests": _MOST_REQUESTS,
        "request_router_config": RequestRouterConfig(
            request_router_class="maxsimd.api.cluster.router:MembersRouter",
            request_routing_stats_period_s=_SLOT_SECONDS,
        ),
    }
    number: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.max_replicas is not None:
        number = {"autoscaling_config": _scaling(cluster)}
    resources = {"num_cpus": cluster.num_cpus, "num_gpus": cluster.num_gpus}
    scorers = serve.deployment(Scorer).options(**number, **ends, ray_actor_options=resources)
    fronts = serve.deployment(serve.ingress()(Front)).options(
        **ends, num_replicas=cluster.fronts, ray_actor_options={"num_cpus": min(1.0, cluster.num_cpus)}
    )
    most, secret = cluster.max_replicas or cluster.replicas, secrets.token_bytes(32)
    by_tenant = config.engine.cache_by_tenant
    bound: Application = fronts.bind(scorers.bind(config.engine, server), most, server, by_tenant, secret)
    return bound


def _scaling(cluster: ClusterConfig) -> AutoscalingConfig:
    policy = AutoscalingPolicy(
        policy_function=f"{QueuedTokensPolicy.__module__}:{QueuedTokensPolicy.__name__}",
        policy_kwargs={"wanted_seconds": cluster.wanted_seconds},
    )
    return AutoscalingConfig(
        min_replicas=cluster.replicas,
        max_replicas=cluster.max_replicas,
        policy=policy,
        metrics_interval_s=_LOOK_SECONDS,
        look_back_period_s=_LOOK_BACK_SECONDS,
        upscale_delay_s=_MORE_AFTER_SECONDS,
        downscale_delay_s=_FEWER_AFTER_SECONDS,
    )
