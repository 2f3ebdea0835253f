"""The life of a server process: listen, load, serve, drain, leave."""

import asyncio
import logging
import signal
import time

import uvloop
from aiohttp import web

from maxsimd.api.app import STATE, build_app
from maxsimd.api.config import ServerConfig
from maxsimd.api.interpreter import garbage_left_alone, switching_often
from maxsimd.engine import Engine, EngineConfig, ModelLoadError
from maxsimd.engine.device.load import DeviceModel

log = logging.getLogger("maxsimd.serve")

_LEAVING_SECONDS = 0.05


def serve(engine_config: EngineConfig, server_config: ServerConfig, started: float) -> int:
    """Serves until SIGTERM or SIGINT; returns the process's exit status.

    `started` is when the command was given (perf_counter), for the log."""
    with switching_often():
        return uvloop.run(_serve(engine_config, server_config, started))


async def _serve(engine_config: EngineConfig, server_config: ServerConfig, started: float) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = Engine(engine_config)
    runner = web.AppRunner(
        build_app(engine, server_config), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    # Listening comes first: while the model loads, /health and /ready say so instead of refusing.
    site = web.TCPSite(runner, server_config.host, server_config.port)
    await site.start()
    port = runner.addresses[0][1]
    try:
        await engine.start()
        with garbage_left_alone():
            log.info(
                "%s is ready on http://%s:%d after %.1f s: %s",
                engine.model.name,
                server_config.host,
                port,
                time.perf_counter() - started,
                _how_it_runs(engine),
            )
            died = asyncio.create_task(engine.until_dead())
            asked = asyncio.create_task(stop.wait())
            await asyncio.wait({died, asked}, return_when=asyncio.FIRST_COMPLETED)
            await _drain(runner, site, server_config.grace_seconds)
            died.cancel()
            asked.cancel()
            return 0 if engine.death is None else 1
    except ModelLoadError as error:
        log.error("%s", error)
        return 1
    finally:
        await engine.stop(grace=server_config.grace_seconds)
        await runner.cleanup()


def _how_it_runs(engine: Engine) -> str:
    prepared = engine.device_model.prepared
    precision = str(prepared.dtype).removeprefix("torch.")
    if prepared.quantized:
        precision += " with int8 weights"
    where = f"{prepared.execution} on {engine.device_model.device}{_kernels(engine.device_model)}"
    return f"{engine.model.score_type.value}, {precision}, {where}"


def _kernels(device_model: DeviceModel) -> str:
    """By which kernels a GPU runs; on a CPU there is no choice to report."""
    if device_model.device.type != "cuda":
        return ""
    return f", attention by {device_model.prepared.attention}, MaxSim by {device_model.maxsim_name}"


async def _drain(runner: web.AppRunner, site: web.TCPSite, grace: float) -> None:
    """Takes no more requests and lets those in flight finish."""
    state = runner.app[STATE]
    state.draining = True
    await site.stop()
    try:
        async with asyncio.timeout(grace):
            await state.until_quiet()
    except TimeoutError:
        log.warning("some requests were still unfinished after %.0f seconds", grace)
    # Answers that are on their way out need a moment to leave.
    await asyncio.sleep(_LEAVING_SECONDS)
    log.info("drained")
