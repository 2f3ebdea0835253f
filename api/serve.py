"""The life of a server process: listen, load, serve, drain, leave."""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop
from aiohttp import web

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.http.app import STATE, build_app
from maxsimd.api.http.connections import ConnectionTable, Listener
from maxsimd.api.http.sockets import max_connections, open_sockets, raise_descriptor_limit, tls_context
from maxsimd.api.model_setup import Loadable, ModelSetup, by_itself
from maxsimd.api.models import SeveralModels
from maxsimd.api.options import in_flags
from maxsimd.api.process import (
    Stop,
    collect_when_quiet,
    garbage_left_alone,
    leave_at_once,
    resident_bytes,
    share_heaps,
    switching_often,
)
from maxsimd.api.state import FleetView, ServerState, Serving
from maxsimd.engine import Engine, EngineConfig, Engines, ModelLoadError
from maxsimd.engine.config import EMBEDDED_MODEL
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.device.host import usable_cores
from maxsimd.engine.device.load import num_given_up
from maxsimd.engine.device.thread import num_left_behind
from maxsimd.engine.workers import take_short_slices

# The engine is not started again after this many deaths within this many seconds.
_MOST_DEATHS, _WITHIN_SECONDS = 5, 600.0
# What takes longer than this, and this many times as long as the first load did, will never be loaded again.
_LEAST_LOAD_SECONDS, _BEYOND_FIRST_LOAD = 60.0, 10.0
# While a model is loaded, the log says so this often, in seconds.
_TOLD_EVERY = 5.0
# The loop counts the seconds of a load itself: time in which the process did not run is none.
_TICK_SECONDS = 1.0


class Deaths:
    """The latest deaths of an engine, a start that failed being one too, and what follows from them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_MOST_DEATHS)

    def note(self) -> float | None:
        """Notes one; returns for how many seconds to wait before the next start: 1, and twice as many after
        each that came within the time in which they count. None where there were too many."""
        now = self._clock()
        self._times.append(now)
        recent = sum(now - each < _WITHIN_SECONDS for each in self._times)
        return None if recent == _MOST_DEATHS else 2.0 ** (recent - 1)


class Loading:
    """Loads the server's model, and remembers how long that took and how often the engine has died since."""

    def __init__(self, engine: Serving, stop: Stop, deaths: Deaths) -> None:
        self._engine = engine
        self._stop = stop
        self._deaths = deaths
        self._first_seconds = 0.0

    async def first(self) -> bool:
        """Whether the model could be loaded. A signal ends the process meanwhile: nothing has been promised
        to anyone."""
        begun = time.monotonic()
        start = await self._start(None)
        if not start.done():
            log.info("stopped while loading")
            leave_at_once(0)
        self._first_seconds = time.monotonic() - begun
        return _succeeded(start)

    async def again(self, state: ServerState) -> bool:
        """Starts an engine that has died, and once more where that fails. Returns whether it runs: not once a
        signal has come, nor once the engine is given up, after which it does not come back."""
        allowed = max(_LEAST_LOAD_SECONDS, _BEYOND_FIRST_LOAD * self._first_seconds)
        while True:
            pause = self._deaths.note()
            if self._engine.restart_obstacle is not None:
                return _give_up(state, self._engine.restart_obstacle)
            if pause is None:
                return _give_up(state, f"it died {_MOST_DEATHS} times in {_WITHIN_SECONDS / 60:.0f} minutes")
            log.warning("the engine is started again in %.0f s", pause)
            if await self._stop.asked_within(pause):
                return False
            start = await self._start(allowed)
            if start.done():
                if _succeeded(start):
                    return True
                continue
            start.cancel()
            await asyncio.wait({start})
            if self._stop.is_asked:
                return False
            return _give_up(state, f"loading its model takes longer than {allowed:.0f} s")

    async def _start(self, allowed: float | None) -> asyncio.Task[None]:
        """Starts the engine; returns when it runs, or could not be started, or a signal has come, or as many
        seconds have passed."""
        start = asyncio.create_task(self._engine.start())
        asked = asyncio.create_task(self._stop.asked())
        seconds = 0.0
        while not start.done() and not asked.done() and (allowed is None or seconds < allowed):
            await asyncio.wait({start, asked}, timeout=_TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            seconds += _TICK_SECONDS
            if not start.done() and seconds % _TOLD_EVERY == 0:
                log.info("loading the model, %.0f s so far", seconds)
        asked.cancel()
        return start


def _give_up(state: ServerState, reason: str) -> bool:
    log.error("the engine is not started again: %s", reason)
    state.comes_back = False
    return False


def _succeeded(start: asyncio.Task[None]) -> bool:
    try:
        start.result()
    except ModelLoadError as error:
        log.error("%s", in_flags(str(error)))
        return False
    except Exception as error:
        log.error(
            "the model cannot be loaded: %s: %s (--log-level debug says where)", type(error).__name__, error
        )
        log.debug("loading failed", exc_info=error)
        return False
    return True


log = logging.getLogger("maxsimd.serve")

# For answers to requests that were ended, and for what is left of answers in the process's buffers.
_LEAVING_SECONDS = 1.0
# How often a front looks whether all engines of its fleet are there, in seconds, and how often at most.
_LOOK_SECONDS, _MOST_LOOKS = 0.1, 600


def serve(engine_config: EngineConfig, server_config: ServerConfig, started: float) -> int:
    """Serves until a signal ends it; returns the process's exit status.

    `started` is when the command was given (perf_counter), for the log."""
    if server_config.models_dir is None:
        return _run(Engine(engine_config), server_config, started)
    # More may join it while the server runs.
    try:
        model = by_itself(engine_config, server_config, EMBEDDED_MODEL)
    except ValueError as error:
        log.error("%s", error)
        return 1
    return serve_several([model], engine_config, server_config, started)


def serve_several(
    models: Sequence[ModelSetup], options: EngineConfig, server_config: ServerConfig, started: float
) -> int:
    """The same for several models; `options` are those of models that are loaded later."""
    try:
        loadable = Loadable(models, server_config.models_dir, options)
    except SetupError as error:
        log.error("%s", error)
        return 1
    engines = Engines(
        {setup.name: setup.engine for setup in models}, weights={setup.name: setup.weight for setup in models}
    )
    several = SeveralModels(engines, models, loadable, server_config.grace_seconds)
    return _run(several, server_config, started)


def _run(engine: Serving, server_config: ServerConfig, started: float) -> int:
    take_short_slices()
    share_heaps(usable_cores().threads)
    with switching_often():
        status = uvloop.run(run_server(engine, server_config, started))
    if num_left_behind() or num_given_up():
        # A thread that is stuck in a library may keep an interpreter from ending.
        leave_at_once(status)
    return status


async def run_server(
    engine: Serving,
    server_config: ServerConfig,
    started: float,
    sockets: Sequence[socket.socket] = (),
    fleet: FleetView | None = None,
) -> int:
    """Serves an engine that is not started yet, until a signal comes, on `sockets` that listen already, if
    there are some; returns the process's exit status. `fleet` is there where other processes belong to the
    server."""
    stop = Stop(server_config.grace_seconds, server_config.drain_seconds)
    try:
        # Listening comes first: while the model loads, /health and /ready say so instead of refusing.
        door = await _open(engine, server_config, sockets)
        door.state.fleet = fleet
    except SetupError as error:
        log.error("%s", error)
        return 1
    try:
        loading = Loading(engine, stop, Deaths())
        if not await loading.first():
            return 1
        while True:
            await _live(engine, door, stop, started)
            started = time.perf_counter()
            if engine.death is None or not door.state.comes_back or not await loading.again(door.state):
                break
        # An engine that was to come back when the signal came has failed nobody who was not told.
        status = 0 if engine.death is None or door.state.comes_back else 1
        stop.begin(status)
        await _drain(engine, door, stop)
        await _finish_requests(door, stop.deadline)
        return status
    finally:
        # What is still unfinished has had its grace.
        await engine.stop(grace=0)
        await door.close()
        stop.done()


@dataclass(frozen=True, slots=True)
class _Door:
    """All that stands between clients and the handlers."""

    url: str
    state: ServerState
    runner: web.AppRunner
    listener: Listener
    connections: ConnectionTable

    async def close(self) -> None:
        self.listener.close()
        await self.runner.cleanup()
        try:
            async with asyncio.timeout(_LEAVING_SECONDS):
                await self.connections.until_empty()
        except TimeoutError:
            log.info("some clients have not read the end of their answers")


async def _open(engine: Serving, config: ServerConfig, sockets: Sequence[socket.socket]) -> _Door:
    """Raises SetupError."""
    tls = tls_context(config)
    app = build_app(engine, config)
    most = max_connections(config.max_connections, raise_descriptor_limit())
    connections = ConnectionTable(config, most, app[STATE].metrics)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_LEAVING_SECONDS)
    await runner.setup()
    assert runner.server is not None
    listener = Listener(runner.server, connections, tls)
    try:
        listener.start(sockets or open_sockets(config.host, config.port))
    except SetupError:
        await runner.cleanup()
        raise
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"{'http' if tls is None else 'https'}://{host}:{listener.port}"
    if not listener.is_on_loopback and not app[STATE].keys.are_asked_for:
        log.warning("whoever can reach %s may use it: there is no --api-key, no --api-key-file", url)
    return _Door(url, app[STATE], runner, listener, connections)


async def _live(engine: Serving, door: _Door, stop: Stop, started: float) -> None:
    """Serves until the engine has died, or a signal has come. It was `started` then (perf_counter)."""
    with garbage_left_alone():
        seconds = time.perf_counter() - started
        for name, facts in _served(engine).items():
            log.info("%s is ready after %.1f s: %s", name, seconds, facts.how_it_runs)
        saying = asyncio.create_task(_say_where(door))
        collecting = asyncio.create_task(collect_when_quiet(lambda: door.state.is_quiet, resident_bytes))
        await _until_the_end(engine, stop)
        collecting.cancel()
        saying.cancel()


async def _say_where(door: _Door) -> None:
    """Logs the address of the playground as the last line of the start: once all engines are there, or a
    minute has passed."""
    fleet = door.state.fleet
    for _ in range(_MOST_LOOKS):
        if fleet is None or fleet.replicas[0] >= fleet.replicas[1]:
            break
        await asyncio.sleep(_LOOK_SECONDS)
    log.info("%s/", door.url)


def _served(engine: Serving) -> dict[str, ModelFacts]:
    """What is served, by name."""
    return engine.all_facts() if isinstance(engine, SeveralModels) else {engine.facts.name: engine.facts}


async def _until_the_end(engine: Serving, stop: Stop) -> None:
    """Returns when the engine has died, or a signal has come."""
    ends = {asyncio.create_task(engine.until_dead()), asyncio.create_task(stop.asked())}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()


async def _drain(engine: Serving, door: _Door, stop: Stop) -> None:
    """Accepts work while /ready says that the server leaves, until the drain is over or the engine has
    died."""
    door.state.draining = True
    ends = {asyncio.create_task(engine.until_dead()), asyncio.create_task(stop.drained())}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()


async def _finish_requests(door: _Door, deadline: float) -> None:
    """Takes no more requests, and lets those in flight finish until the deadline; what is not done by then
    gets a 503."""
    door.state.closing = True
    door.listener.close()
    try:
        async with asyncio.timeout_at(deadline):
            await door.state.until_quiet()
            await door.connections.until_quiet()
    except TimeoutError:
        log.warning("%d requests were not done in time and are answered 503", door.state.end_requests())
        await asyncio.wait({asyncio.create_task(door.connections.until_quiet())}, timeout=_LEAVING_SECONDS)
    log.info("all requests are finished")
