"""Starts what exists while an engine runs, and frees what one that died has left."""

import asyncio
import gc
import weakref

from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.load import DeviceModel, load_device_model
from maxsimd.engine.device.loading import load_on_thread
from maxsimd.engine.device.shared import Seat
from maxsimd.engine.device.thread import DeviceThread
from maxsimd.engine.metrics import EngineMetrics
from maxsimd.engine.runtime.running import Died, Running
from maxsimd.engine.tenants import TenantLimits

# Before another start, what the requests of an engine that died still do has this long to end.
_DEAD_SECONDS = 1.0
# How often is looked whether it is gone, before another is loaded beside it.
_MOST_LOOKS = 5


async def launch(config: EngineConfig, metrics: EngineMetrics, died: Died, tenants: TenantLimits) -> Running:
    """Loads the model on a thread of its own and starts the actors. Raises ModelLoadError."""
    device, device_model = await load_on_thread(lambda: load_device_model(config))
    try:
        return _running(config, metrics, device, device_model, died, tenants)
    except BaseException:
        device.close()
        raise


async def launch_beside(
    seat: Seat, config: EngineConfig, metrics: EngineMetrics, died: Died, tenants: TenantLimits
) -> Running:
    """The same on a device that others use: the model is loaded while they are served. Raises
    ModelLoadError."""
    try:
        device_model = await seat.load(config)
        return _running(config, metrics, seat, device_model, died, tenants)
    except asyncio.CancelledError:
        seat.leave()
        raise
    except BaseException:
        await asyncio.to_thread(seat.close)
        raise


def _running(
    config: EngineConfig,
    metrics: EngineMetrics,
    device: DeviceThread | Seat,
    device_model: DeviceModel,
    died: Died,
    tenants: TenantLimits,
) -> Running:
    """Starts the actors; the model's cache is closed where that fails."""
    try:
        return Running(config, metrics, device, device_model, died, tenants)
    except BaseException:
        if device_model.cache is not None:
            device_model.cache.close()
        raise


async def bury(dead: Running | None) -> None:
    """Frees what an engine that died has left, its model above all, before another is loaded. The caller must
    not hold it any more."""
    if dead is None:
        return
    await dead.close(_DEAD_SECONDS)
    is_there = weakref.ref(dead)
    del dead
    for _ in range(_MOST_LOOKS):
        gc.collect()
        if is_there() is None:
            return
        await asyncio.sleep(0.01)  # threads and callbacks that are about to end still know it
