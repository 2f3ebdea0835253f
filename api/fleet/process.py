"""A process of a fleet, front or engine: `python -m maxsimd.api.fleet.process`, with its setup on stdin."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import uvloop

from maxsimd.api.config import SetupError
from maxsimd.api.fleet.engine_answers import EngineAnswers
from maxsimd.api.fleet.fleet_engine import FleetEngine, FrontView, check_limits
from maxsimd.api.fleet.link import Door, UnixAddress
from maxsimd.api.fleet.roster import Listed, Roster
from maxsimd.api.fleet.supervisor import Setup, read_setup
from maxsimd.api.http.sockets import connections_by_port, raise_descriptor_limit, tls_context
from maxsimd.api.keys import ApiKeys
from maxsimd.api.logs import set_up_logging
from maxsimd.api.media import MediaSources
from maxsimd.api.process import (
    Stop,
    collect_when_quiet,
    exit_at_once,
    exiting_on_signals,
    frequent_thread_switches,
    postponed_garbage_collection,
    resident_bytes,
    share_heaps,
    show_stacks_on_sigusr1,
)
from maxsimd.api.serve import EngineDeaths, Loading, run_server
from maxsimd.api.state import DroppedEvents
from maxsimd.engine import Engine, Tenant
from maxsimd.engine.device.host import usable_cores
from maxsimd.engine.workers import take_short_slices

log = logging.getLogger("maxsimd.fleet")

# Seconds that a restarted front waits for running engines before it lets clients in.
_CONNECTING_SECONDS = 5.0


def main() -> NoReturn:
    started = time.perf_counter()
    show_stacks_on_sigusr1()
    setup = read_setup()
    set_up_logging(setup.server_config.log_level, setup.server_config.log_format)
    take_short_slices()
    share_heaps(usable_cores().threads)
    with frequent_thread_switches():
        try:
            status = uvloop.run(_front(setup, started) if setup.is_front else _engine(setup, started))
        except Exception:
            log.exception("an unexpected error ends the process")
            status = 1
    exit_at_once(status)


async def _front(setup: Setup, started: float) -> int:
    timeout, is_alone = setup.server_config.replica_timeout_seconds, len(setup.front_paths) == 1
    listed = [Listed(slot, UnixAddress(path)) for slot, path in enumerate(setup.engine_paths)]
    roster = Roster(listed, timeout=timeout, is_alone=is_alone)
    engine = FleetEngine(roster, caches_by_tenant=setup.engine_config.cache_by_tenant)
    try:
        _check(setup, engine)
    except SetupError as error:
        log.error("%s", error)
        return 1
    others = {slot: UnixAddress(path) for slot, path in enumerate(setup.front_paths) if slot != setup.slot}
    view = FrontView(engine, lambda: setup.slot, lambda: others, setup.secret)
    sockets = [socket.socket(fileno=number) for number in setup.sockets]
    await view.door.open(setup.front_paths[setup.slot])
    with exiting_on_signals():
        await _connect(engine, setup.engine_paths)
    try:
        return await run_server(engine, setup.server_config, started, sockets, view)
    finally:
        await view.door.close()


async def _connect(engine: FleetEngine, paths: Sequence[str]) -> None:
    """Waits for an engine if one listens; otherwise /health shall say so."""
    if any(map(os.path.exists, paths)):
        with suppress(TimeoutError):
            await asyncio.wait_for(engine.start(), _CONNECTING_SECONDS)


def _check(setup: Setup, engine: FleetEngine) -> None:
    """Raises SetupError for what would keep a front from serving. The engine gets its tenants before it
    connects: replicas that run would forget theirs."""
    config = setup.server_config

    def set_tenants(tenants: Mapping[str, Tenant]) -> None:
        check_limits(tenants, config.replicas)
        engine.set_tenants(tenants)

    ApiKeys(config, set_tenants=set_tenants, must_be_named=engine.caches_by_tenant, secret=setup.secret)
    tls_context(config)
    connections_by_port(config, raise_descriptor_limit())
    MediaSources(config)


async def _engine(setup: Setup, started: float) -> int:
    config = setup.server_config
    stop = Stop(config.drain_seconds + config.grace_seconds, is_led=True)
    engine = Engine(setup.engine_config)
    engine.metrics.registry.register(DroppedEvents())
    if not await Loading(engine, stop, EngineDeaths()).first():
        return 1
    answers = EngineAnswers(engine)
    door = Door(answers, answers.queued_tokens)
    await door.open(setup.engine_paths[setup.slot])
    seconds = time.perf_counter() - started
    log.info("replica %d is ready after %.1f s: %s", setup.slot, seconds, engine.facts.how_it_runs)
    with postponed_garbage_collection():
        collecting = asyncio.create_task(collect_when_quiet(answers.is_idle, resident_bytes))
        dead, signaled = asyncio.create_task(engine.until_dead()), asyncio.create_task(stop.signaled())
        await asyncio.wait({dead, signaled}, return_when=asyncio.FIRST_COMPLETED)
        if engine.death is None:
            # Fronts that got the signal too finish their requests first.
            left = asyncio.create_task(door.until_left())
            seconds = stop.deadline - asyncio.get_running_loop().time()
            await asyncio.wait({dead, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        collecting.cancel()
    if engine.death is not None:
        log.error("replica %d has died: %s", setup.slot, engine.death)
        stop.begin(1)
    await door.close()
    await engine.stop(grace=0)
    stop.done()
    return 0 if engine.death is None else 1


if __name__ == "__main__":
    main()
