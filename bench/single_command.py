"""`maxsimd bench single`."""

from pathlib import Path
from typing import Any

import click

from maxsimd.bench.report import publish


@click.command("single")
@click.argument("model", required=False)
@click.option("--rounds", type=int, default=300, show_default=True, help="Requests; medians are reported.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--quantization", type=click.Choice(["none", "int8"]), default="none", show_default=True)
@click.option("--threads", type=int, help="Threads for computing; by default as many as serving takes.")
@click.option(
    "--other",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkout of another version, with its kernels compiled.",
)
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_single(
    model: str | None, rounds: int, other: Path | None, json_file: str | None, **settings: Any
) -> None:
    """Requests of one document and of 40, with all layers in one call of our library, layer by layer, and in
    another version."""
    from maxsimd.bench.single import measure_single

    found = measure_single(model, other, settings, rounds)
    publish({"model": model, "rounds": rounds, "other": other and str(other), **settings}, found, json_file)
