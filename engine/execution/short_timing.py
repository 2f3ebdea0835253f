"""The shortest times of several ways of computing the same on a CPU, in turns: milliseconds at load."""

import time
from collections.abc import Callable, Mapping

from maxsimd.engine.execution.selfcheck.threads import one_thread

_TIMES = 3


def milliseconds_in_turns(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest of a few runs of each on one thread, after one that is not counted.

    What counts is the thread's processor time: beside other work the clock would tell more about that."""
    best = dict.fromkeys(runs, float("inf"))
    with one_thread():
        for run in runs.values():
            run()
        for _ in range(_TIMES):
            for name, run in runs.items():
                started = time.thread_time()
                run()
                best[name] = min(best[name], (time.thread_time() - started) * 1e3)
    return best
