"""A server watched over time: memory, descriptors, tasks, latency; as lines of JSON, a picture, and a
trend."""

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from maxsimd.bench.plots import save
from tests.chaos.client import Record
from tests.chaos.running import Running
from tests.chaos.tables import percentile
from tests.chaos.traffic import Outcome

_BLOCKS = 20
_FEWEST = 3 * _BLOCKS


@dataclass(frozen=True, slots=True)
class Sample:
    """`seconds` since the start; `malloc_mb` and `python_blocks` as in `Allocated`; latencies in milliseconds
    of requests answered since the sample before."""

    seconds: float
    resident_mb: float
    malloc_mb: float | None
    python_blocks: int
    descriptors: int
    tasks: int
    requests: int
    p50_ms: float | None
    p99_ms: float | None


class Sampler:
    """Looks at a server every `period` seconds."""

    def __init__(self, server: Running, records: list[Record], period: float) -> None:
        self.samples: list[Sample] = []
        self._server, self._records, self._period = server, records, period

    async def run(self) -> None:
        """Until cancelled."""
        started, seen = time.monotonic(), 0
        while True:
            await asyncio.sleep(self._period)
            state = await asyncio.to_thread(self._server.state)
            new = self._records[seen:]
            seen += len(new)
            waited = [1e3 * (one.done - one.sent) for one in new if one.outcome == Outcome.RIGHT.value]
            self.samples.append(
                Sample(
                    time.monotonic() - started,
                    self._server.resident_bytes / (1 << 20),
                    state.allocated.malloc_bytes and state.allocated.malloc_bytes / (1 << 20),
                    state.allocated.blocks,
                    state.descriptors,
                    state.tasks,
                    state.engine["requests"],
                    percentile(waited, 0.5),
                    percentile(waited, 0.99),
                )
            )


def write(samples: Sequence[Sample], path: Path) -> None:
    path.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples), encoding="utf-8")


def trend(samples: Sequence[Sample], name: str) -> tuple[float, float] | None:
    """How much the least of a value grows in an hour, in the second half, and half the width of its 95 %
    confidence interval. None where there are too few samples, or one lacks the value.

    From the least of each block: what more there is at a moment is of requests that are there. As one block
    resembles the one before, the error is that of fewer blocks, by the correlation of each one's residual
    with the next one's (Santer et al., Journal of Geophysical Research 105(D6), 2000, section 3)."""
    half = samples[len(samples) // 2 :]
    values = [getattr(sample, name) for sample in half]
    if len(half) < _FEWEST or None in values:
        return None
    curve = np.array([[sample.seconds / 3600 for sample in half], values]).T
    blocks = np.array_split(curve, _BLOCKS)
    hours = np.array([block[:, 0].mean() for block in blocks])
    least = np.array([block[:, 1].min() for block in blocks])
    fit = stats.linregress(hours, least)
    left = least - (fit.intercept + fit.slope * hours)
    # Residuals that do not vary at all say nothing of each other.
    alike = float(left[1:] @ left[:-1] / (left @ left)) if left.any() else 0.0
    independent = max(3.0, _BLOCKS * (1 - max(0.0, alike)) / (1 + max(0.0, alike)))
    error = fit.stderr * math.sqrt((_BLOCKS - 2) / (independent - 2))
    return float(fit.slope), float(stats.t.ppf(0.975, independent - 2) * error)


def draw(samples: Sequence[Sample], faults: Sequence[float], path: Path) -> Path:
    """Draws the samples, and marks when there were faults (seconds since the start)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "maxsimd"
    from matplotlib import pyplot

    minutes = [sample.seconds / 60 for sample in samples]
    panels: list[tuple[str, dict[str, list[Any]]]] = [
        (
            "memory, MiB",
            {
                "resident": [sample.resident_mb for sample in samples],
                "allocated in C": [sample.malloc_mb or math.nan for sample in samples],
            },
        ),
        ("descriptors", {"": [sample.descriptors for sample in samples]}),
        ("tasks", {"": [sample.tasks for sample in samples]}),
        (
            "latency, ms",
            {
                "median": [sample.p50_ms or math.nan for sample in samples],
                "99th percentile": [sample.p99_ms or math.nan for sample in samples],
            },
        ),
    ]
    figure, rows = pyplot.subplots(len(panels), 1, figsize=(7, 8), layout="constrained", sharex=True)
    for axes, (label, lines) in zip(rows, panels, strict=True):
        for name, values in lines.items():
            axes.plot(minutes, values, linewidth=1, label=name)
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
