"""`maxsimd bench gpu` and `maxsimd bench kernels`."""

import asyncio
import importlib.util
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maxsimd.bench.report import publish
from maxsimd.bench.running import run_and_clean_up

if TYPE_CHECKING:
    import torch


@click.command("kernels")
@click.option("--rounds", type=int, default=50, show_default=True, help="Turns; medians are reported.")
@click.option("--out", type=click.Path(file_okay=False), help="Folder for the report, its figures and plots.")
@click.option(
    "--compiled", is_flag=True, help="Instead, what they take when compiled, and bounds; needs no GPU."
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="File for --compiled as JSON.")
def bench_kernels(rounds: int, out: str | None, compiled: bool, json_file: str | None) -> None:
    """The kernels on this GPU, beside plain torch, flash-maxsim and late-interaction-kernels where
    installed."""
    if compiled:
        _print_compiled(json_file)
        return
    if json_file is not None:
        raise click.UsageError("--json goes with --compiled; otherwise, --out names a folder")
    from maxsimd.bench.gpu.kernels import measure_kernels

    device = _gpu()
    _finish("kernels-gpu", "Kernels on a GPU", measure_kernels(device, rounds), out)


@click.command("gpu")
@click.option(
    "--only", multiple=True, type=click.Choice(["serving", "trace"]), help="Run only this; repeatable."
)
@click.option("--out", type=click.Path(file_okay=False), help="Folder for the report, its figures and plots.")
def bench_gpu(only: tuple[str, ...], out: str | None) -> None:
    """A ColBERT of jina-colbert-v2's shape on this GPU: published workloads, and how busy the device is."""
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
    _finish("serving-gpu", "Servers on a GPU", figures, out)


def _print_compiled(json_file: str | None) -> None:
    from maxsimd.bench.gpu import compiled
    from maxsimd.engine.ops import triton as triton_ops

    if importlib.util.find_spec("triton") is None:
        raise click.ClickException(f"nothing compiles kernels, because {triton_ops.MISSING}")
    rows = list(compiled.rows())
    click.echo(compiled.as_text(rows))
    if json_file is not None:
        Path(json_file).write_text(json.dumps(compiled.as_json(rows), indent=1) + "\n", encoding="utf-8")
        click.echo(f"wrote {json_file}", err=True)


def _finish(name: str, title: str, figures: dict[str, Any], out: str | None) -> None:
    publish({}, figures, None)
    if out is not None:
        from maxsimd.bench.gpu.report import write_report

        for path in write_report(name, title, figures, Path(out)):
            click.echo(f"wrote {path}", err=True)


def _gpu() -> "torch.device":
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("this measures a GPU, and there is none")
    return torch.device("cuda")
