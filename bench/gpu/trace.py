"""How busy the device is under load, from a profiler's trace of its kernels."""

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from maxsimd.bench.datasets import random_requests
from maxsimd.bench.gpu.serving import Workload
from maxsimd.engine import CUT_LONG, Engine, EngineConfig

Figures = dict[str, Any]


async def measure_busy_share(config: EngineConfig, workload: Workload) -> Figures:
    """Runs the workload through an engine in this process, the second half of it under the profiler."""
    from torch.profiler import ProfilerActivity, profile

    requests = random_requests(
        workload.requests, workload.documents, workload.input_len, workload.range_ratio, False, seed=7
    )
    half = len(requests) // 2
    gate = asyncio.Semaphore(workload.concurrency)
    async with Engine(config) as engine:

        async def one(query: str, documents: list[str]) -> None:
            async with gate:
                await engine.score(query, documents, truncation=CUT_LONG, cache="bypass")

        await asyncio.gather(*(one(str(request.query), request.documents) for request in requests[:half]))
        # Without a GPU it shows that everything else runs.
        activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            await asyncio.gather(*(one(str(request.query), request.documents) for request in requests[half:]))
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if str(event.device_type) == "DeviceType.CUDA"
    ]
    return busy_share(spans)


def busy_share(spans: Iterable[tuple[float, float]]) -> Figures:
    """The share of time in which a kernel ran and the gaps between kernels, from (start, end) in
    microseconds, without the first and last tenth of the time, when the load is not full."""
    table = np.array(sorted(spans), dtype=np.float64).reshape(-1, 2)
    if len(table) == 0:
        return {"kernels": 0}
    first, last = table[0, 0], table[:, 1].max()
    low, high = first + 0.1 * (last - first), last - 0.1 * (last - first)
    table = table[(table[:, 1] > low) & (table[:, 0] < high)].clip(low, high)
    done = np.maximum.accumulate(table[:, 1])
    gaps = np.maximum(0.0, table[1:, 0] - done[:-1])
    idle = gaps.sum() + (table[0, 0] - low) + (high - done[-1])
    return {
        "kernels": len(table),
        "busy_share": round(float(1 - idle / (high - low)), 4),
        "gap_median_us": round(float(np.median(gaps)), 2),
        "gap_p99_us": round(float(np.percentile(gaps, 99)), 2),
        "longest_gap_us": round(float(gaps.max()), 1),
    }
