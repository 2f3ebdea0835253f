"""`maxsimd bench packed`."""

from typing import Any

import click

from maxsimd.bench.report import publish
from maxsimd.bench.running import run_and_clean_up
from maxsimd.bench.text_models import SHAPES


@click.command("packed")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="deberta-v3-base", show_default=True)
@click.option("--texts", type=int, default=200, show_default=True, help="Docstrings of different lengths.")
@click.option("--layers", type=int, default=12, show_default=True, help="Layers of the model.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; medians are reported.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--quantization", type=click.Choice(["none", "int8"]), default="none", show_default=True)
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_packed(
    shape: str, texts: int, layers: int, rounds: int, json_file: str | None, **settings: Any
) -> None:
    """A model with relative positions: packed, in padded batches, and by sentence-transformers."""
    from maxsimd.bench.packed import measure_packed

    found = run_and_clean_up(measure_packed(shape, texts, layers, rounds, settings))
    publish({"shape": shape, "layers": layers, "rounds": rounds, **settings}, found, json_file)
