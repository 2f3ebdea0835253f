"""Measures the limits of the device."""

import click
import torch

from maxsimd.bench.gpu.first_day.found import show_all
from maxsimd.bench.gpu.limits import measure_limits


@click.command()
@click.option("--dry", is_flag=True, help="On the CPU.")
def main(dry: bool) -> None:
    """A product of 8192^3, a copy and a sum."""
    limits = measure_limits(torch.device("cpu" if dry else "cuda"))
    show_all({"limits": limits.figures()})


if __name__ == "__main__":
    main()
