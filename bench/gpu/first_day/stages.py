"""The steps of a day on a GPU, the most important first: all together may take nine minutes, after which
the last ones are cut short."""

import sys

from maxsimd.bench.gpu.first_day.smallest import KERNELS
from maxsimd.bench.gpu.first_day.steps import Step

_HERE = "maxsimd.bench.gpu.first_day"

# Where a GPU is not to be used, whether there is one or not.
DRY = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def steps() -> list[Step]:
    """Whether kernels are right, then how fast they, models and servers are."""
    return [
        _ours("machine", 30, "machine"),
        _ours("smallest", 105, "smallest", *KERNELS),
        # The other packages choose among many variants of their kernels first.
        _ours("MaxSim beside others", 160, "kernels", "--rounds", "12"),
        _ours("forward, jina", 70, "forward", "jina"),
        _ours("serving", 85, "serving", "--requests", "2000"),
        _ours("forward, xlm-roberta", 55, "forward", "xlm-roberta"),
        _ours("forward, modernbert", 50, "forward", "modernbert"),
        _ours("tiles of MaxSim", 60, "tiles", "--rounds", "8"),
    ]


def in_dry(chosen: list[Step]) -> list[Step]:
    """The same steps, small and on a CPU."""
    return [
        Step(step.name, (*step.command, "--dry"), 3 * step.seconds, DRY | dict(step.environment))
        for step in chosen
    ]


def _ours(name: str, seconds: float, module: str, *arguments: str) -> Step:
    return Step(name, (sys.executable, "-m", f"{_HERE}.{module}", *arguments), seconds)
