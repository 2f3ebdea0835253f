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


@dataclass(frozen=True, slots=True)
class Sample:
    """`seconds` since the start; `malloc_mb` and `python_blocks` as in `Allocated`; latencies in milliseconds of requests answered since the sample before."""

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


def memory_trend(samples: Sequence[Sample]) -> tuple[float, float] | None:
    """MiB an hour in the second half, and half the width of its 95 % confidence interval. From means of
    blocks, since one sample says little that the one before did not. None where there are too few."""
    half = samples[len(samples) // 2 :]
    blocks = [block for block in np.array_split(np.array(_curve(half)), _BLOCKS) if len(block)]
    if len(blocks) < 4:
        return None
    hours, megabytes = np.array([block.mean(axis=0) for block in blocks]).T
    fit = stats.linregress(hours, megabytes)
    return float(fit.slope), float(stats.t.ppf(0.975, len(blocks) - 2) * fit.stderr)


def _curve(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    return [(sample.seconds / 3600, sample.resident_mb) for sample in samples]


def draw(samples: Sequence[Sample], faults: Sequence[float], path: Path) -> Path:
    """Draws the samples, and marks when there were faults (seconds since the start)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "maxsimd"
    from matplotlib import pyplot

    minutes = [sample.seconds / 60 for sample in samples]
    panels: list[tuple[str, dict[str, list[Any]]]] = [
        ("memory, MiB", {"": [sample.resident_mb for sample in samples]}),
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
            axes.set_yscale("log")
            axes.legend(frameon=False)
        else:
            axes.set_ylim(bottom=0)
    rows[-1].set_xlabel("minutes (red: a fault)")
    return save(figure, path)
