"""How long work takes: of the host, which launches it, and of the thread's current device, which does it."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Run = Callable[[], object]
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds until the host has launched something, and from its first kernel to its last on the
    device, during which the device may have waited for the host."""

    host: float
    device: float


def times_on_cuda(run: Run) -> Times:
    """The times of one run, which is waited for, after all that was launched before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    began = time.perf_counter()
    run()
    launched = time.perf_counter()
    end.record()
    end.synchronize()
    return Times((launched - began) * 1e3, start.elapsed_time(end))


def milliseconds_on_cuda(run: Run, budget: float) -> float:
    """The device's time for one run, as the median of rounds of several runs back to back; all of them
    together take about `budget` milliseconds, and at least one run a round."""
    run()  # compiles kernels and loads libraries
    once = times_on_cuda(run).device
    runs = max(1, int(budget / _ROUNDS / max(once, 1e-3)))

    def several() -> None:
        for _ in range(runs):
            run()

    return statistics.median(times_on_cuda(several).device for _ in range(_ROUNDS)) / runs


def milliseconds_in_turns_on_cuda(runs: Mapping[str, Run], budget: float) -> dict[str, float]:
    """Median milliseconds of each of `runs` on the device. They take turns in every round, and all rounds
    together take about `budget` milliseconds."""
    repeats = {}
    for name, run in runs.items():
        run()  # compiles kernels and loads libraries
        once = times_on_cuda(run).device
        repeats[name] = max(1, int(budget / len(runs) / _ROUNDS / max(once, 1e-3)))

    def several(name: str) -> None:
        for _ in range(repeats[name]):
            runs[name]()

    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, found in taken.items():
            found.append(times_on_cuda(functools.partial(several, name)).device / repeats[name])
    return {name: statistics.median(found) for name, found in taken.items()}
