"""Times of functions that run on a device, in turns."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Run = Callable[[], object]

# On a GPU this many follow each other without a gap, and one launch hides behind the one before.
_LAUNCHES = 10


def medians(contenders: Mapping[str, Run], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of each on the device, run in turns; the first three rounds warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 3):
        for name, run in contenders.items():
            taken = _seconds(run, device)
            if number >= 3:
                seconds[name].append(taken)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _seconds(run: Run, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_LAUNCHES):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / _LAUNCHES
