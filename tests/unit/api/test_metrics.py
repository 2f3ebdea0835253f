"""How late the event loop is, as a monitor reads it."""

import asyncio
import contextlib
import time

from prometheus_client import CollectorRegistry

from maxsimd.api.metrics import ServerMetrics
from tests.waiting import until


async def test_only_what_the_event_loop_is_late_counts_as_lag() -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry)

    def lag(sample: str, **labels: str) -> float:
        return registry.get_sample_value(f"maxsimd_event_loop_lag_seconds_{sample}", labels) or 0.0

    watcher = asyncio.create_task(metrics.watch_lag())
    await until(lambda: watcher.done() or lag("bucket", le="0.05") >= 1)  # now and then it is hardly late
    assert not watcher.done()
    count, total = lag("count"), lag("sum")
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 (this is what must be noticed)
    await until(lambda: watcher.done() or lag("count") > count)
    # It slept for at most its period of 0.1 s meanwhile, which is not lag.
    assert 0.25 < lag("sum") - total < 30
    assert not watcher.done()
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
