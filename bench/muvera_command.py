"""`maxsimd bench muvera`."""

import asyncio
from dataclasses import asdict
from typing import Any

import click

from maxsimd.api.options import config_from, options_from
from maxsimd.bench.report import publish
from maxsimd.engine.config import EngineConfig


@click.command("muvera")
@click.argument("model", required=False)
@options_from(EngineConfig, exclude=frozenset({"model"}))
@click.option("--queries", type=int, default=200, show_default=True, help="Docstring queries.")
@click.option("--candidates", type=int, default=500, show_default=True, help="BM25 candidates of each.")
@click.option("--k-sim", type=int, help="Bits of a region.")
@click.option("--r-reps", type=int, help="Repetitions.")
@click.option("--d-proj", type=int, help="Numbers of a projected token; 0 projects nothing.")
@click.option("--d-final", type=int, help="Numbers that vectors are shortened to.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_muvera(queries: int, candidates: int, json_file: str | None, **values: Any) -> None:
    """Fixed dimensional encodings (MUVERA) beside MaxSim, with and without what the paper does not have."""
    given = {name: values.pop(name) for name in ("k_sim", "r_reps", "d_proj", "d_final")}
    config = config_from(EngineConfig, values)
    from maxsimd.bench.muvera import measure_muvera
    from maxsimd.pooling.muvera import Muvera

    parameters = {name: value for name, value in given.items() if value is not None}
    if parameters.get("d_proj") == 0:
        parameters["d_proj"] = None
    ours = Muvera(**parameters)
    encodings = {
        "encoding": ours,
        "as_in_the_paper": Muvera(**parameters, full_length=False),
        "the_papers_parameters": Muvera(k_sim=5, r_reps=20, d_proj=16, full_length=False),
    }
    figures = asyncio.run(measure_muvera(config, encodings, queries, candidates))
    publish({"score_type": config.score_type, **asdict(ours)}, figures, json_file)
