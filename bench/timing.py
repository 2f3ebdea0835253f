"""Times of functions that run on a device, in turns."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[], object]

# On a GPU this many follow each other without a gap: the host launches one while others run.
_LAUNCHES = 10
_WARM_UP = 3
# Cycles for which a GPU waits before calls that are to follow each other without a gap: some 3 ms, in which
# the host launches the first of them. Its launch would otherwise count as the device's time.
_LEAD = 6_000_000


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of a call: `streamed`, where calls follow each other without a gap, as in a step; and
    `alone`, where the device waits for each, so that launching is part of it."""

    streamed: float
    alone: float


def timings(contenders: Mapping[str, Run], device: torch.device, rounds: int) -> dict[str, Timing]:
    """Both medians of each contender, run in turns."""
    streamed = _medians(contenders, device, rounds, _LAUNCHES)
    alone = _medians(contenders, device, rounds, 1)
    return {name: Timing(streamed[name], alone[name]) for name in contenders}


def medians(contenders: Mapping[str, Run], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of each on the device, run in turns and without gaps."""
    return _medians(contenders, device, rounds, _LAUNCHES)


def one_after_another(runs: Sequence[Run]) -> Run:
    """Calls the next of `runs` each time, from the first again after the last: with data of its own for each,
    none finds its data in the cache of the device."""
    turns = itertools.cycle(runs)
    return lambda: next(turns)()


def _medians(
    contenders: Mapping[str, Run], device: torch.device, rounds: int, launches: int
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + _WARM_UP):
        for name, run in contenders.items():
            taken = _seconds(run, device, launches)
            if number >= _WARM_UP:
                seconds[name].append(taken)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _seconds(run: Run, device: torch.device, launches: int) -> float:
    """Seconds of one of `launches` calls; on a CPU, of a single call."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    if launches > 1:
        torch.cuda._sleep(_LEAD)
    start.record(stream)
    for _ in range(launches):
        run()
    stop.record(stream)
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / launches
