"""`maxsimd bench pages`, `page-speed`, `beside-pages` and `picture-stalls`: models that read pictures."""

from typing import Any

import click

from maxsimd.api.options import config_from, options_from
from maxsimd.bench.page_models import SHAPES
from maxsimd.bench.report import publish
from maxsimd.bench.running import run_and_clean_up
from maxsimd.engine.config import EngineConfig

_json = click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
_layers = click.option("--layers", type=int, default=2, show_default=True, help="Layers of each tower.")


@click.command("pages")
@click.argument("model")
@click.option("--pages", type=int, default=100, show_default=True, help="Docstrings, each drawn as a page.")
@click.option("--queries", type=int, default=50, show_default=True, help="First sentences to look for.")
@options_from(EngineConfig, exclude=frozenset({"model"}))
@_json
def bench_pages(model: str, pages: int, queries: int, json_file: str | None, **values: Any) -> None:
    """How well MODEL finds docstrings that are drawn as pages, in several fonts and layouts."""
    from maxsimd.bench.page_ranking import measure_page_ranking

    config = config_from(EngineConfig, {**values, "model": model})
    publish({"model": model}, run_and_clean_up(measure_page_ranking(config, pages, queries)), json_file)


@click.command("page-speed")
@click.option(
    "--shape", "shapes", type=click.Choice(list(SHAPES)), multiple=True, help="Repeatable; all by default."
)
@click.option("--pages", type=int, default=20, show_default=True, help="Pages of different sizes.")
@_layers
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; medians are reported.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@_json
def bench_page_speed(
    shapes: tuple[str, ...], pages: int, layers: int, rounds: int, dtype: Any, json_file: str | None
) -> None:
    """The engine beside sentence-transformers, with models as wide as published ones and few layers."""
    from maxsimd.bench.page_speed import measure_page_speed

    chosen = list(shapes or SHAPES)
    settings = {"layers": layers, "rounds": rounds, "dtype": dtype}
    found = run_and_clean_up(measure_page_speed(chosen, pages, layers, rounds, dtype))
    figures = {f"{shape}_{name}": value for shape, each in found.items() for name, value in each.items()}
    publish(settings, figures, json_file)


@click.command("beside-pages")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="colpali", show_default=True)
@click.option("--pages", type=int, default=50, show_default=True, help="Pages that wait.")
@_layers
@_json
def bench_beside_pages(shape: str, pages: int, layers: int, json_file: str | None) -> None:
    """One-document requests of text while many pages wait."""
    from maxsimd.bench.beside_pages import measure_beside_pages

    found = run_and_clean_up(measure_beside_pages(shape, pages, layers))
    publish({"shape": shape, "layers": layers}, found, json_file)


@click.command("picture-stalls")
@click.option("--pictures", type=int, default=12, show_default=True, help="Pictures in a request.")
@_json
def bench_picture_stalls(pictures: int, json_file: str | None) -> None:
    """How long the event loop stands still while pictures of 12 million pixels are read."""
    from maxsimd.bench.picture_stalls import measure_picture_stalls

    publish({"pictures": pictures}, run_and_clean_up(measure_picture_stalls(pictures)), json_file)
