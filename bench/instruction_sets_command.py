"""`maxsimd bench instruction-sets`."""

import os

import click

from maxsimd.bench.report import write_json


@click.command("instruction-sets")
@click.option(
    "--shape", type=click.Choice(["minilm-l6", "mpnet-base"]), default="minilm-l6", show_default=True
)
@click.option("--texts", type=int, default=48, show_default=True, help="Docstrings of different lengths.")
@click.option("--rounds", type=int, default=7, show_default=True, help="Rounds; medians are reported.")
@click.option(
    "--seconds", type=float, default=30.0, show_default=True, help="After these no round begins under a cap."
)
@click.option("--threads", type=int, help="Threads for computing, of each; by default one for each core.")
@click.option(
    "--onnx", type=click.Path(exists=True, dir_okay=False), help="Python with sentence-transformers[onnx]."
)
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_instruction_sets(
    shape: str,
    texts: int,
    rounds: int,
    seconds: float,
    threads: int | None,
    onnx: str | None,
    json_file: str | None,
) -> None:
    """Each precision on this processor and on what less of its instructions leaves, beside
    sentence-transformers' default under the same cap."""
    from maxsimd.bench.instruction_sets import Plan, measure_instruction_sets, table

    plan = Plan(shape, texts, rounds, seconds, threads or len(os.sched_getaffinity(0)))
    figures = measure_instruction_sets(plan, onnx)
    click.echo(table(figures))
    if json_file:
        settings = {"shape": shape, "texts": texts, "rounds": rounds, "threads": plan.threads}
        write_json(json_file, {"settings": settings, "figures": figures})
