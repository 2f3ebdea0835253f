"""`maxsimd bench several`."""

import asyncio

import click

from maxsimd.bench.report import publish


@click.command("several")
@click.argument("models", nargs=-1)
@click.option("--weights", default="3,1", show_default=True, help="Shares of the device of two models.")
@click.option("--seconds", type=float, default=30.0, show_default=True, help="Seconds of mixed load.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="float32", show_default=True)
@click.option("--threads", type=int, help="Threads for computing.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_several(
    models: tuple[str, ...],
    weights: str,
    seconds: float,
    dtype: str,
    threads: int | None,
    json_file: str | None,
) -> None:
    """Two models in one process: the memory of each alone and of both, and their shares of the device.

    MODELS are two folders; without any, random checkpoints as large as mpnet-base and
    deberta-v3-base are made."""
    if len(models) not in (0, 2):
        raise click.UsageError(f"name two models or none, not {len(models)}")
    first, second = map(float, weights.split(","))
    from maxsimd.bench.several import at_hand, measure_memory, measure_shares

    with at_hand(models) as folders:
        figures = measure_memory(folders, dtype, threads)
        figures |= asyncio.run(measure_shares(folders, (first, second), seconds, dtype, threads))
    publish({"weights": weights, "seconds": seconds, "dtype": dtype, "threads": threads}, figures, json_file)
