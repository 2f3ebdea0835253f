"""Measures MaxSim beside plain torch and other packages."""

import click
import torch

from maxsimd.bench.gpu.first_day.found import Value, show_all
from maxsimd.bench.gpu.kernels import Setting, measure_maxsim
from maxsimd.bench.gpu.limits import measure_limits
from maxsimd.bench.gpu.shapes import MAXSIM_SHAPES, PUBLISHED_SHAPES, MaxSimShape

_DRY_MAXSIM = (MaxSimShape("few", 4, 5, (9, 9), 16, rounded=True),)


@click.command()
@click.option("--dry", is_flag=True, help="Small, on the CPU.")
@click.option("--rounds", default=20, show_default=True)
@torch.inference_mode()
def main(dry: bool, rounds: int) -> None:
    """Prints each figure as soon as it is measured. Exits with 1 where ours failed."""
    device = torch.device("cpu" if dry else "cuda")
    limits = measure_limits(device)
    show_all({"limits": limits.figures()})
    setting = Setting(device, 1 if dry else rounds, limits)
    are_right = True
    for shape in _DRY_MAXSIM if dry else (*MAXSIM_SHAPES, *PUBLISHED_SHAPES):
        are_right &= _show(measure_maxsim(shape, setting))
    if not are_right:
        raise SystemExit(1)


def _show(figures: dict[str, dict[str, Value]]) -> bool:
    """Prints figures; returns whether our kernel is among those that ran and were right."""
    show_all(figures)
    return not any(key == "maxsimd_failed" for values in figures.values() for key in values)


if __name__ == "__main__":
    main()
