"""`maxsimd bench gpu` and `maxsimd bench kernels`."""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from maxsimd.bench.report import publish
from maxsimd.bench.running import run_and_clean_up

if TYPE_CHECKING:
    import torch


@click.command("kernels")
@click.option("--rounds", type=int, default=50, show_default=True, help="Turns; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_kernels(rounds: int, json_file: str | None) -> None:
    """The kernels on this GPU, beside plain torch, flash-maxsim and late-interaction-kernels where
    installed."""
    from maxsimd.bench.gpu.kernels import measure_kernels

    device = _gpu()
    publish({"rounds": rounds}, measure_kernels(device, rounds), json_file)


@click.command("gpu")
@click.option(
    "--only", multiple=True, type=click.Choice(["serving", "trace"]), help="Run only this; repeatable."
)
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_gpu(only: tuple[str, ...], json_file: str | None) -> None:
    """A ColBERT of XLM-RoBERTa large's shape on this GPU: published workloads, and how busy the device is."""
    from maxsimd.bench.gpu.serving import WORKLOADS, Shape, measure_serving, save_colbert
    from maxsimd.bench.gpu.trace import measure_busy_share
    from maxsimd.engine import EngineConfig

    _gpu()
    wanted = set(only or ("serving", "trace"))
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_colbert(Path(folder), Shape())
        if "serving" in wanted:
            figures.update(run_and_clean_up(measure_serving(checkpoint, "cuda")))
        if "trace" in wanted:
            shorter = replace(WORKLOADS[0], requests=400)
            config = EngineConfig(model=checkpoint, device="cuda")
            figures["trace"] = asyncio.run(measure_busy_share(config, shorter))
    publish({}, figures, json_file)


def _gpu() -> "torch.device":
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("this measures a GPU, and there is none")
    return torch.device("cuda")
