"""The steps of a day on a GPU, the most important first: all together may take nine and a half minutes, after
which the last ones are cut short."""

import sys

from maxsimd.bench.gpu.first_day.steps import Step

_HERE = "maxsimd.bench.gpu.first_day"
_NCU_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "WarpStateStats", "LaunchStats")

# Where a GPU is not to be used, whether there is one or not.
DRY = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def steps() -> list[Step]:
    """In the order of what they decide: whether kernels are right, then how fast models and servers are, then
    which variants of kernels are the fastest and why."""
    sections = [word for section in _NCU_SECTIONS for word in ("--section", section)]
    ncu = ("ncu", "--clock-control", "none", "--launch-skip", "1", "--launch-count", "1", *sections)
    return [
        _ours("machine", 30, "machine"),
        _ours("smallest", 110, "smallest", "maxsim", "attention", "projection", "layers", "--fewer"),
        _ours("products", 60, "products"),
        _ours("forward, jina", 110, "forward", "jina", "unfused", "without GELU in products", "as it is"),
        _ours("serving", 110, "serving", "serve", "--requests", "2000"),
        _ours("tiles of MaxSim", 90, "tiles", "--rounds", "8"),
        _ours("tiles of attention", 80, "attention_tiles", "--rounds", "8"),
        _ours("forward, modernbert", 60, "forward", "modernbert", "unfused", "as it is"),
        _ours("forward, xlm-roberta", 60, "forward", "xlm-roberta", "without GELU in products", "as it is"),
        _ours("serving, 4 threads", 60, "serving", "serve", "--requests", "2000", "--tokenizer-threads", "4"),
        # The other packages choose among many variants of their kernels first.
        _ours("MaxSim beside others", 170, "kernels", "compare", "--rounds", "15"),
        *(
            Step(
                f"ncu, {shape} query",
                (*ncu, "--kernel-name", "regex:maxsim", *_python("kernels", "once", shape)),
                30,
                needs="ncu",
            )
            for shape in ("long", "short")
        ),
    ]


def in_dry(chosen: list[Step]) -> list[Step]:
    """The same steps, small and on a CPU. Tools for GPUs are left out."""
    return [
        Step(step.name, (*step.command, "--dry"), step.seconds, DRY | dict(step.environment))
        for step in chosen
        if step.needs is None
    ]


def _ours(name: str, seconds: float, module: str, *arguments: str) -> Step:
    return Step(name, _python(module, *arguments), seconds)


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"{_HERE}.{module}", *arguments)
