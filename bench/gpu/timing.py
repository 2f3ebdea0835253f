"""Times on a device, and what the device can do at best."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

_SIDE = 4096
_COPY_BYTES = 1 << 30
_SMALL = 256  # of both, where there is no GPU and the figures mean nothing

Run = Callable[[], object]


def medians(contenders: Mapping[str, Run], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of each on the device, run in turns; the first three rounds warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 3):
        for name, run in contenders.items():
            taken = _seconds(run, device)
            if number >= 3:
                seconds[name].append(taken)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def product_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    side = _SIDE if device.type == "cuda" else _SMALL
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * side**3 / medians({"product": lambda: a @ b}, device, 20)["product"]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes/s read and written by a copy."""
    size = _COPY_BYTES if device.type == "cuda" else _SMALL * 1024
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * size / medians({"copy": lambda: target.copy_(source)}, device, 20)["copy"]


def _seconds(run: Run, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
