"""A server watched over time: memory, descriptors, tasks, latency; as a trend and as a picture."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from maxsimd.bench.plots import save
from tests.chaos.crowd import Record
from tests.chaos.findings import percentile
from tests.chaos.running import Running
from tests.chaos.traffic import Outcome

_BLOCKS = 20
_FEWEST = 3 * _BLOCKS


@dataclass(frozen=True, slots=True)
class Sample:
    """`seconds` since the start; `malloc_mb` and `blocks` as in `State`; latencies in milliseconds, of what
    was answered since the sample before."""

    seconds: float
    resident_mb: float
    malloc_mb: float
    blocks: float
    descriptors: float
    tasks: float
    p50_ms: float
    p99_ms: float


async def watch(server: Running, records: list[Record], samples: list[Sample]) -> None:
    """Looks at a server every second, until cancelled. What is not known is NaN."""
    started, seen = time.monotonic(), 0
    while True:
        await asyncio.sleep(1)
        state = await asyncio.to_thread(server.state)
        new = records[seen:]
        seen += len(new)
        waited = [1e3 * (one.done - one.sent) for one in new if one.outcome == Outcome.RIGHT.value]
        samples.append(
            Sample(
                time.monotonic() - started,
                server.resident_bytes / (1 << 20),
                (state.malloc_bytes or math.nan) / (1 << 20),
                state.blocks,
                state.descriptors,
                state.tasks,
                percentile(waited, 0.5) or math.nan,
                percentile(waited, 0.99) or math.nan,
            )
        )


def trend(samples: Sequence[Sample], name: str) -> str:
    """How much the least of a value grows in an hour, in the second half, and half the width of its 95 %
    confidence interval.

    From the least of each block: what more there is at a moment is of requests that are there. As one block
    resembles the one before, the error is that of fewer blocks, by the correlation of each one's residual
    with the next one's (Santer et al., Journal of Geophysical Research 105(D6), 2000, section 3)."""
    half = samples[len(samples) // 2 :]
    if len(half) < _FEWEST:
        return "not known"
    curve = np.array([[sample.seconds / 3600, getattr(sample, name)] for sample in half])
    blocks = np.array_split(curve, _BLOCKS)
    hours = np.array([block[:, 0].mean() for block in blocks])
    least = np.array([block[:, 1].min() for block in blocks])
    fit = stats.linregress(hours, least)
    left = least - (fit.intercept + fit.slope * hours)
    # Residuals that do not vary at all say nothing of each other.
    alike = max(0.0, float(left[1:] @ left[:-1] / (left @ left)) if left.any() else 0.0)
    independent = max(3.0, _BLOCKS * (1 - alike) / (1 + alike))
    error = fit.stderr * math.sqrt((_BLOCKS - 2) / (independent - 2))
    return f"{fit.slope:+,.1f} ± {stats.t.ppf(0.975, independent - 2) * error:,.1f}"


_PANELS = {
    "memory, MiB": {"resident_mb": "resident", "malloc_mb": "allocated in C"},
    "descriptors": {"descriptors": ""},
    "tasks": {"tasks": ""},
    "latency, ms": {"p50_ms": "median", "p99_ms": "99th percentile"},
}


def draw(samples: Sequence[Sample], faults: Sequence[float], path: Path) -> Path:
    """Draws the samples, and marks when there were faults (seconds since the start)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "maxsimd"
    from matplotlib import pyplot

    minutes = [sample.seconds / 60 for sample in samples]
    figure, rows = pyplot.subplots(len(_PANELS), 1, figsize=(7, 8), layout="constrained", sharex=True)
    for axes, (label, lines) in zip(rows, _PANELS.items(), strict=True):
        for name, shown in lines.items():
            axes.plot(minutes, [getattr(sample, name) for sample in samples], linewidth=1, label=shown)
        # At the foot of the panel; one line of marks takes less room in the file than a line each.
        moments, place = [seconds / 60 for seconds in faults], axes.get_xaxis_transform()
        axes.plot(moments, [0.02] * len(moments), "|", color="tab:red", markeredgewidth=0.5, transform=place)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel(label)
        if len(lines) > 1:
            axes.legend(frameon=False)
        if "ms" in label:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    rows[-1].set_xlabel("minutes (red: a fault)")
    return save(figure, path)
