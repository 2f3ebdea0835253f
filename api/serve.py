"""The life of a server process: listen, load, serve, drain, leave."""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvloop
from aiohttp import web

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.http.app import STATE, build_app
from maxsimd.api.http.connections import ConnectionTable, Listener
from maxsimd.api.http.sockets import connections_by_port, open_sockets, raise_descriptor_limit, tls_context
from maxsimd.api.model_setup import Loadable, ModelSetup, single_setup
from maxsimd.api.models import SeveralModels
from maxsimd.api.options import in_flags
from maxsimd.api.process import (
    Stop,
    collect_when_quiet,
    exit_at_once,
    frequent_thread_switches,
    postponed_garbage_collection,
    resident_bytes,
    share_heaps,
)
from maxsimd.api.state import FleetView, ServerState, Serving
from maxsimd.engine import Engine, EngineConfig, ModelLoadError
from maxsimd.engine.config import EMBEDDED_MODEL
from maxsimd.engine.device.host import usable_cores
from maxsimd.engine.device.load import num_given_up
from maxsimd.engine.device.thread import num_left_behind
from maxsimd.engine.workers import take_short_slices

if TYPE_CHECKING:
    from maxsimd.api.grpc.server import GrpcServer

# Too many deaths end the server.
_MOST_DEATHS, _WITHIN_SECONDS = 5, 600.0
# A later load is given up after this long, and so many times as long as the first one.
_LEAST_LOAD_SECONDS, _BEYOND_FIRST_LOAD = 60.0, 10.0
# Seconds between log lines on a load.
_TOLD_EVERY = 5.0
# Seconds are counted here, because the process may stand still.
_TICK_SECONDS = 1.0


class EngineDeaths:
    """The latest deaths of an engine; failed starts count too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_MOST_DEATHS)

    def note(self) -> float | None:
        """The seconds until the next start: 1, doubled by each recent death; None after too many."""
        now = self._clock()
        self._times.append(now)
        recent = sum(now - each < _WITHIN_SECONDS for each in self._times)
        return None if recent == _MOST_DEATHS else 2.0 ** (recent - 1)


class Loading:
    """Loads the server's model, at the start and after the engine's deaths."""

    def __init__(self, engine: Serving, stop: Stop, deaths: EngineDeaths) -> None:
        self._engine = engine
        self._stop = stop
        self._deaths = deaths
        self._first_seconds = 0.0

    async def first(self) -> bool:
        """Whether the model could be loaded. A signal ends the process: it has promised nothing yet."""
        begun = time.monotonic()
        start = await self._start(None)
        if not start.done():
            log.info("stopped while loading")
            exit_at_once(0)
        self._first_seconds = time.monotonic() - begun
        return _succeeded(start)

    async def again(self, state: ServerState) -> bool:
        """Restarts an engine that has died, repeatedly if that fails. Returns whether it runs: not after a
        signal, nor after giving up, when it does not come back."""
        allowed = max(_LEAST_LOAD_SECONDS, _BEYOND_FIRST_LOAD * self._first_seconds)
        while True:
            pause = self._deaths.note()
            if self._engine.restart_obstacle is not None:
                return _give_up(state, self._engine.restart_obstacle)
            if pause is None:
                return _give_up(state, f"it died {_MOST_DEATHS} times in {_WITHIN_SECONDS / 60:.0f} minutes")
            log.warning("the engine is started again in %.0f s", pause)
            if await self._stop.signaled_within(pause):
                return False
            start = await self._start(allowed)
            if start.done():
                if _succeeded(start):
                    return True
                continue
            start.cancel()
            await asyncio.wait({start})
            if self._stop.is_signaled:
                return False
            return _give_up(state, f"loading its model takes longer than {allowed:.0f} s")

    async def _start(self, allowed: float | None) -> asyncio.Task[None]:
        """Starts the engine. Returns when it runs or has failed, on a signal, or after `allowed` seconds."""
        start = asyncio.create_task(self._engine.start())
        signaled = asyncio.create_task(self._stop.signaled())
        seconds = 0.0
        while not start.done() and not signaled.done() and (allowed is None or seconds < allowed):
            await asyncio.wait({start, signaled}, timeout=_TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            seconds += _TICK_SECONDS
            if not start.done() and seconds % _TOLD_EVERY == 0:
                log.info("still loading")
        signaled.cancel()
        return start


def _give_up(state: ServerState, reason: str) -> bool:
    log.error("the engine is not started again: %s", reason)
    state.comes_back = False
    return False


def _succeeded(start: asyncio.Task[None]) -> bool:
    try:
        start.result()
        return True
    except ModelLoadError as error:
        log.error("%s", in_flags(str(error)))
    except Exception as error:
        kind = type(error).__name__
        log.error("the model cannot be loaded: %s: %s (--log-level debug says where)", kind, error)
        log.debug("loading failed", exc_info=error)
    return False


log = logging.getLogger("maxsimd.serve")

# For answers to ended requests, and the rest of answers in buffers.
_LEAVING_SECONDS = 1.0
# Seconds between a front's checks whether its engines are there, and the most checks.
_LOOK_SECONDS, _MOST_LOOKS = 0.1, 600


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    started: float,
    models: Sequence[ModelSetup] | None = None,
) -> int:
    """Serves one model, or several `models`, until a signal; returns the exit status. `engine_config` holds
    for models that are loaded later. `started` is the command's start (perf_counter)."""
    try:
        if models is None and server_config.models_dir is not None:
            models = [single_setup(engine_config, server_config, EMBEDDED_MODEL)]
        engine: Serving
        if models is None:
            engine = Engine(engine_config)
        else:
            loadable = Loadable(models, server_config.models_dir, engine_config)
            engine = SeveralModels(models, loadable, server_config.grace_seconds)
        # At once: also an event loop needs some.
        connections_by_port(server_config, raise_descriptor_limit())
    except (SetupError, ValueError) as error:
        log.error("%s", error)
        return 1
    take_short_slices()
    share_heaps(usable_cores().threads)
    with frequent_thread_switches():
        status = uvloop.run(run_server(engine, server_config, started))
    if num_left_behind() or num_given_up():
        # A thread that is stuck in a library may keep the interpreter from ending.
        exit_at_once(status)
    return status


async def run_server(
    engine: Serving,
    server_config: ServerConfig,
    started: float,
    sockets: Sequence[socket.socket] = (),
    fleet: FleetView | None = None,
) -> int:
    """Serves an engine that is not started yet until a signal comes; returns the exit status. `sockets`
    listen already. `fleet` is there if other processes belong to the server."""
    stop = Stop(server_config.grace_seconds, server_config.drain_seconds, fleet is not None)
    try:
        # Listen first: /health and /ready answer while the model loads.
        door = await _open(engine, server_config, sockets, fleet)
    except SetupError as error:
        log.error("%s", error)
        return 1
    try:
        loading = Loading(engine, stop, EngineDeaths())
        if not await loading.first():
            return 1
        while True:
            await _serve_until_end(engine, door, stop, started)
            started = time.perf_counter()
            if engine.death is None or not door.state.comes_back or not await loading.again(door.state):
                break
        # If the engine was to come back, every request has been told so.
        status = 0 if engine.death is None or door.state.comes_back else 1
        stop.begin(status)
        # Take work while /ready answers 503.
        door.state.draining = True
        await _first_of(engine.until_dead(), stop.drained())
        await _finish_requests(door, stop.deadline)
    finally:
        # Unfinished requests have had their grace.
        await engine.stop(grace=0)
        await door.close()
        stop.done()
    log.info("stopped")
    return status


@dataclass(frozen=True, slots=True)
class _HttpServer:
    url: str
    state: ServerState
    runner: web.AppRunner
    listener: Listener
    connections: ConnectionTable
    grpc: "GrpcServer | None"

    async def close(self) -> None:
        self.listener.close()
        if self.grpc is not None:
            await self.grpc.close(0)
        await self.runner.cleanup()
        try:
            async with asyncio.timeout(_LEAVING_SECONDS):
                await self.connections.until_empty()
        except TimeoutError:
            log.info("some clients have not read the end of their answers")


async def _open(
    engine: Serving, config: ServerConfig, sockets: Sequence[socket.socket], fleet: FleetView | None
) -> _HttpServer:
    """Raises SetupError."""
    tls = tls_context(config)
    app = build_app(engine, config, fleet)
    most, most_of_grpc = connections_by_port(config, raise_descriptor_limit())
    connections = ConnectionTable(config, most, app[STATE].metrics)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_LEAVING_SECONDS)
    await runner.setup()
    assert runner.server is not None
    listener = Listener(runner.server, connections, tls)
    grpc = None
    try:
        if config.grpc_port is not None:
            grpc = await _open_grpc(app[STATE], config, most_of_grpc)
        listener.start(sockets or open_sockets(config.host, config.port))
    except SetupError:
        if grpc is not None:
            await grpc.close(0)
        await runner.cleanup()
        raise
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"{'http' if tls is None else 'https'}://{host}:{listener.port}"
    app[STATE].is_on_loopback = listener.is_on_loopback
    if not listener.is_on_loopback and not app[STATE].keys.are_asked_for:
        log.warning("anyone who can reach %s can use it; set --api-key or --api-key-file", url)
    return _HttpServer(url, app[STATE], runner, listener, connections, grpc)


async def _open_grpc(state: ServerState, config: ServerConfig, most_connections: int) -> "GrpcServer":
    """Raises SetupError."""
    try:
        from maxsimd.api.grpc.server import GrpcServer  # late: an extra
    except ImportError as error:
        message = "--grpc-port needs the extra grpc: pip install '.[grpc]' in the checkout"
        raise SetupError(f"{message} ({error})") from error
    server = GrpcServer(state, config, most_connections)
    await server.start()
    return server


async def _serve_until_end(engine: Serving, door: _HttpServer, stop: Stop, started: float) -> None:
    """Serves until the engine has died or a signal has come. `started` is a time of perf_counter."""
    with postponed_garbage_collection():
        seconds = time.perf_counter() - started
        several = engine.all_facts() if isinstance(engine, SeveralModels) else None
        for name, facts in (several or {engine.facts.name: engine.facts}).items():
            log.info("%s is ready after %.1f s: %s", name, seconds, facts.how_it_runs)
            if door.state.config.normalize_scores and not facts.normalizes:
                log.warning("--normalize-scores has no effect on %s: its scores have no bounds", name)
        saying = asyncio.create_task(_log_address(door))
        collecting = asyncio.create_task(collect_when_quiet(lambda: door.state.is_quiet, resident_bytes))
        await _first_of(engine.until_dead(), stop.signaled())
        collecting.cancel()
        saying.cancel()


async def _log_address(door: _HttpServer) -> None:
    """Logs the playground's address once all engines are there, or after a minute."""
    fleet = door.state.fleet
    for _ in range(_MOST_LOOKS):
        if fleet is None or fleet.replicas[0] >= fleet.replicas[1]:
            break
        await asyncio.sleep(_LOOK_SECONDS)
    if door.grpc is not None:
        log.info("gRPC on %s", door.grpc.address)
    log.info("%s/", door.url)


async def _first_of(*waits: Coroutine[Any, Any, None]) -> None:
    tasks = {asyncio.create_task(wait) for wait in waits}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _finish_requests(door: _HttpServer, deadline: float) -> None:
    """Takes no more requests. Those in flight get a 503 at the deadline."""
    door.state.closing = True
    door.listener.close()
    seconds = max(0.0, deadline - asyncio.get_running_loop().time()) + _LEAVING_SECONDS
    of_grpc = [] if door.grpc is None else [asyncio.create_task(door.grpc.close(seconds))]
    try:
        async with asyncio.timeout_at(deadline):
            await door.state.until_quiet()
            await door.connections.until_quiet()
    except TimeoutError:
        log.warning("%d requests did not finish in time and got a 503", door.state.end_requests())
        await asyncio.wait({asyncio.create_task(door.connections.until_quiet())}, timeout=_LEAVING_SECONDS)
    # The answers to the last calls may be under way.
    await asyncio.gather(*of_grpc)
