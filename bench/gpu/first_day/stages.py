"""The stages of the first day and their steps, which together take less than ten minutes a stage."""

import sys
from collections.abc import Callable, Mapping

from maxsimd.bench.gpu.first_day.steps import Step

_HERE = "maxsimd.bench.gpu.first_day"
_NCU_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "WarpStateStats", "LaunchStats")

# Where a GPU is not to be used, whether there is one or not.
DRY = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _does_anything_run() -> list[Step]:
    sanitized = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    return [
        _ours("machine", 60, "machine"),
        _ours("limits", 60, "limits"),
        _ours("smallest maxsim", 200, "smallest", "maxsim"),
        _ours("smallest attention", 150, "smallest", "attention"),
        _ours("smallest projection", 100, "smallest", "projection"),
        _ours("smallest layers", 100, "smallest", "layers"),
        _ours("rows behind 2^31", 90, "far_rows"),
        *(
            Step(
                f"memcheck of {kernel}",
                (*sanitized, *_python("smallest", kernel, "--cases", cases)),
                90,
                needs="compute-sanitizer",
            )
            for kernel, cases in (("maxsim", "0"), ("attention", "1"), ("projection", "0"), ("layers", "0"))
        ),
        # Kernels that are interpreted cannot be compiled, in a dry run either.
        Step("machine code", _python("machine_code"), 120, {"TRITON_INTERPRET": "0"}),
        _pytest("tests of kernels", 240, "tests/gpu/test_kernels.py"),
    ]


def _engine() -> list[Step]:
    return [
        _ours("forward, auto", 150, "forward"),
        _ours("forward, triton", 120, "forward", "--attention", "triton"),
        _ours("forward, varlen", 120, "forward", "--attention", "varlen"),
        _ours("small steps", 120, "forward", "--small-steps"),
        _ours("small steps without graphs", 120, "forward", "--small-steps", "--graphs", "off"),
        _pytest("tests of engines", 300, "tests/gpu/test_engine.py"),
    ]


def _kernels() -> list[Step]:
    sections = [word for section in _NCU_SECTIONS for word in ("--section", section)]
    ncu = ("ncu", "--clock-control", "none", "--kernel-name", "regex:maxsim", "--launch-skip", "1")
    return [
        _ours("kernels", 240, "kernels", "compare"),
        _ours("tiles", 180, "tiles"),
        _ours("tiles of attention", 100, "attention_tiles"),
        *(
            Step(
                f"ncu, {shape} query",
                (*ncu, "--launch-count", "1", *sections, *_python("kernels", "once", shape)),
                90,
                needs="ncu",
            )
            for shape in ("short", "long")
        ),
    ]


def _serving() -> list[Step]:
    return [
        _ours("serving, 600 requests", 240, "serving", "serve", "--requests", "600"),
        _ours("trace", 150, "serving", "trace"),
    ]


def _final() -> list[Step]:
    return [
        _ours("kernels", 240, "kernels", "compare", "--rounds", "50"),
        _ours("forward, auto", 120, "forward"),
        _ours("serving", 300, "serving", "serve"),
        _ours("trace", 120, "serving", "trace"),
    ]


STAGES: Mapping[str, Callable[[], list[Step]]] = {
    "1": _does_anything_run,
    "2": _engine,
    "3": _kernels,
    "4": _serving,
    "5": _final,
}


def in_dry(steps: list[Step]) -> list[Step]:
    """The same steps, small and on a CPU. Tools for GPUs are left out, tests are collected alone."""
    return [
        Step(
            step.name,
            (*step.command, "--collect-only" if "pytest" in step.command else "--dry"),
            step.seconds,
            DRY | dict(step.environment),
        )
        for step in steps
        if step.needs is None
    ]


def _ours(name: str, seconds: float, module: str, *arguments: str) -> Step:
    return Step(name, _python(module, *arguments), seconds)


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"{_HERE}.{module}", *arguments)


def _pytest(name: str, seconds: float, file: str) -> Step:
    # The engine's warnings are read from the log, those of tests that pass too.
    options = ("-q", "-p", "no:cacheprovider", "-o", "log_cli=true", "-o", "log_cli_level=WARNING")
    return Step(name, (sys.executable, "-m", "pytest", *options, file), seconds)
