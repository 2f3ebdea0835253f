"""Measures a whole server under load."""

from dataclasses import replace

import click

from maxsimd.bench.gpu.first_day.found import show_all
from maxsimd.bench.gpu.first_day.model import JINA, SMALL, checkpoint
from maxsimd.bench.gpu.serving import WORKLOADS, Workload, measure_serving
from maxsimd.bench.running import run_and_clean_up

_DRY = (Workload("few", 6, 1, 64, 0.5, 3),)


@click.command()
@click.option("--requests", type=int, help="No more requests of the first workload, and no other workload.")
@click.option("--dry", is_flag=True, help="A tiny model on the CPU.")
def main(requests: int | None, dry: bool) -> None:
    """Prints the figures of the published workloads, with a server as it is by default."""
    workloads = WORKLOADS if requests is None else (replace(WORKLOADS[0], requests=requests),)
    model, device = checkpoint(SMALL if dry else JINA), "cpu" if dry else "cuda"
    show_all(run_and_clean_up(measure_serving(model, device, _DRY if dry else workloads)))


if __name__ == "__main__":
    main()
