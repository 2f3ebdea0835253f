"""`maxsimd bench packed`."""

from typing import Any

import click

from maxsimd.bench.report import publish
from maxsimd.bench.running import run_and_clean_up
from maxsimd.bench.text_models import SHAPES


@click.command("packed")
@click.option(
    "--shape", "shapes", type=click.Choice(list(SHAPES)), multiple=True, help="May be repeated; default: all."
)
@click.option("--texts", type=int, default=200, show_default=True, help="Texts of different lengths.")
@click.option(
    "--mix",
    type=click.Choice(["docstrings", "mixed"]),
    default="docstrings",
    show_default=True,
    help="Docstrings, or every second time a single sentence.",
)
@click.option("--layers", type=int, default=12, show_default=True, help="Layers of the model.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; medians are reported.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    show_default=True,
    help="auto: float32, and bfloat16 where the processor multiplies it natively.",
)
@click.option("--quantization", type=click.Choice(["none", "int8"]), default="none", show_default=True)
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_packed(
    shapes: tuple[str, ...], mix: str, dtype: str, quantization: str, json_file: str | None, **sizes: int
) -> None:
    """Models that elsewhere run padded: packed, in padded batches, and by sentence-transformers."""
    from maxsimd.bench.packed import Plan, measure_all

    shapes = shapes or tuple(SHAPES)
    plan = Plan(sizes["texts"], sizes["layers"], sizes["rounds"], {"quantization": quantization})
    settings: dict[str, Any] = {"mix": mix, "quantization": quantization, **sizes}
    figures: dict[str, Any] = {}
    try:
        run_and_clean_up(measure_all(shapes, _dtypes(dtype), mix, plan, figures))
    finally:
        # Of a run that is ended early, the shapes that it has come to.
        publish(settings, figures, json_file)


def _dtypes(dtype: str) -> list[str]:
    import torch

    from maxsimd.engine.execution.devices import choose_dtype, dtype_name

    if dtype != "auto":
        return [dtype]
    return list(dict.fromkeys(["float32", dtype_name(choose_dtype("auto", torch.device("cpu")))]))
