"""Measures kernels beside plain torch and other packages, or launches ours alone under a profiler."""

import click
import torch

from maxsimd.bench.gpu.first_day.found import Value, show_all
from maxsimd.bench.gpu.kernels import (
    Setting,
    measure_attention,
    measure_maxsim,
    measure_projection,
)
from maxsimd.bench.gpu.limits import measure_limits
from maxsimd.bench.gpu.maxsim_contenders import contenders, draw
from maxsimd.bench.gpu.shapes import (
    ATTENTION_SHAPES,
    MAXSIM_SHAPES,
    PUBLISHED_SHAPES,
    AttentionShape,
    MaxSimShape,
)

_DRY_MAXSIM = (MaxSimShape("few", 4, 5, (9, 9), 16, rounded=True),)
_DRY_ATTENTION = (AttentionShape("few", 2, 10, 4, 2, 32, True),)


@click.group()
def main() -> None:
    """Kernels on this GPU."""


@main.command("compare")
@click.option("--dry", is_flag=True, help="Small, on the CPU.")
@click.option("--rounds", default=20, show_default=True)
@torch.inference_mode()
def compare(dry: bool, rounds: int) -> None:
    """Prints each figure as soon as it is measured. Exits with 1 where ours failed."""
    device = torch.device("cpu" if dry else "cuda")
    limits = measure_limits(device)
    show_all({"limits": limits.figures()})
    setting = Setting(device, 1 if dry else rounds, limits)
    are_right = True
    for shape in _DRY_MAXSIM if dry else (*MAXSIM_SHAPES, *PUBLISHED_SHAPES):
        are_right &= _show(measure_maxsim(shape, setting))
    for case in _DRY_ATTENTION if dry else ATTENTION_SHAPES:
        are_right &= _show(measure_attention(case, setting))
    are_right &= _show(measure_projection(40 if dry else 16_384, 1024, 128, setting))
    if not are_right:
        raise SystemExit(1)


@main.command("once")
@click.argument("shape", type=click.Choice(["short", "long"]))
@click.option("--dry", is_flag=True, help="Small, on the CPU.")
@torch.inference_mode()
def once(shape: str, dry: bool) -> None:
    """Launches MaxSim a few times and nothing else, for a profiler to look at."""
    device = torch.device("cpu" if dry else "cuda")
    chosen = _DRY_MAXSIM[0] if dry else MAXSIM_SHAPES[0 if shape == "short" else 1]
    run = contenders(chosen, device)["maxsimd"](draw(chosen, device, 0))
    for _ in range(3):
        run()


def _show(figures: dict[str, dict[str, Value]]) -> bool:
    """Prints figures; returns whether our kernel is among those that ran and were right."""
    show_all(figures)
    return not any(key == "maxsimd_failed" for values in figures.values() for key in values)


if __name__ == "__main__":
    main()
