"""The shortest times of several ways of computing the same on a CPU, in turns: milliseconds at load."""

import time
from collections.abc import Callable, Mapping

_TIMES = 3


def milliseconds_in_turns(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest of a few runs of each, after one that is not counted."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(_TIMES):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - started) * 1e3)
    return best
