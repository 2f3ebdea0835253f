"""Ends an engine's threads."""

import asyncio
import logging
from collections.abc import Callable

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.device.thread import Device
from maxsimd.engine.workers import WorkerPool

log = logging.getLogger(__name__)

# How long each of an engine's threads is waited for where a stuck device may keep it.
STUCK_SECONDS = 2.0


def end_threads(
    device: Device, pool: WorkerPool, cache: EmbeddingCache | None, seconds: float | None
) -> None:
    """Ends all threads and waits for that: briefly, where the device has not ended within `seconds`.

    It knows nothing of the model, so that the thread which calls this does not hold it."""
    if device.close(seconds):
        seconds = None
    else:
        log.error("the device's thread is stuck; it is left behind, and holds its model until it goes on")
        seconds = STUCK_SECONDS
    pool.close(seconds)
    if cache is not None:
        cache.close(seconds)


async def call_in_thread(function: Callable[[], object]) -> None:
    """Calls a function that blocks in a thread, or on this event loop if the interpreter is about to end and
    starts no thread."""
    try:
        call = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:
        function()
    else:
        await call
