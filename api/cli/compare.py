"""`maxsimd compare`: models side by side on one's own queries and documents."""

import json
import math
import multiprocessing
import resource
import sys
import typing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, cast

import click

from maxsimd.api.cli.evaluate import (
    Judged,
    Measured,
    Ranked,
    Run,
    in_one_line,
    judged_files,
    measuring,
    rank,
    ranking_options,
    shown_p,
)
from maxsimd.api.help import Command
from maxsimd.api.options import config_file_option, config_from, options_from
from maxsimd.engine.config import EngineConfig, refuse_missing_folder, shown_name


def _rank(config: EngineConfig, judged: Judged) -> tuple[Ranked, int]:
    """Ranks in this process, which is new, so that its peak memory in bytes is the model's."""
    ranked = rank(config, judged)
    unit = 1 if sys.platform == "darwin" else 1024  # see getrusage(2)
    return ranked, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def agreement(one: Run, other: Run) -> float:
    """Kendall's tau-b between the scores of each query's documents, the mean over queries; NaN where no query
    has two documents whose scores differ."""
    from scipy.stats import kendalltau

    taus = []
    for query, scores in one.items():
        ids = [*scores]
        tau = kendalltau([scores[id_] for id_ in ids], [other[query][id_] for id_ in ids]).statistic
        if not math.isnan(tau):
            taus.append(float(tau))
    return sum(taus) / len(taus) if taus else math.nan


@click.command(cls=Command)
@click.argument("models", nargs=-1, required=True, metavar="MODEL[=TYPE] MODEL[=TYPE]...")
@config_file_option
@judged_files
@ranking_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON")
@options_from(EngineConfig, exclude=frozenset({"model"}))
def compare(models: tuple[str, ...], measures: tuple[str, ...], as_json: bool, **values: Any) -> None:
    """Compare models on your queries and documents: quality, speed, memory and agreement.

    TYPE is a --score-type, such as MODEL=bi-encoder. Each model ranks in a process of its own. With judgments
    (--qrels), p is how likely a difference to the first model is by chance: a paired randomization test."""
    if len(models) < 2:
        raise click.UsageError("name two models or more, such as: maxsimd compare MODEL MODEL --data FOLDER")
    config = config_from(EngineConfig, values)
    configs = [_with_model(config, model) for model in models]
    with in_one_line():
        for chosen in configs:
            refuse_missing_folder(chosen.model)
        judged = Judged.of(values, needs_grades=False)
    measure = measuring(measures) if judged.grades else None
    if measure:
        # A measure that cannot be computed is told before documents are ranked.
        measure(judged.grades, {query: {ids[0]: 0.0} for query, ids in judged.work})
    rows: list[dict[str, Any]] = []
    first: tuple[Run, Mapping[str, Measured]] | None = None
    failure: click.ClickException | None = None
    for model, chosen in zip(models, configs, strict=True):
        try:
            ranked, peak_bytes = _in_new_process(chosen, judged)
        except click.ClickException as error:
            failure = click.ClickException(f"{model}: {error.message}")
            break  # what is done is shown
        of_measures = measure(judged.grades, ranked.scores) if measure else {}
        first = first or (ranked.scores, of_measures)
        row: dict[str, Any] = {
            "model": model,
            "kind": ranked.kind,
            "precision": ranked.precision,
            "documents_per_s": round(ranked.pairs_per_s, 1),
            "ms_per_query": round(1e3 * ranked.seconds / len(ranked.scores), 1),
            "memory_mb": peak_bytes >> 20,
            "agreement": round(agreement(first[0], ranked.scores), 3),
        }
        for name, each in of_measures.items():
            row[name] = round(each.value, 4)
            if rows:
                row[f"{name}, p"] = each.p(first[1][name])
        rows.append(row)
    if rows:
        click.echo(json.dumps(rows) if as_json else _table(rows))
    if failure is not None:
        raise failure


def _with_model(config: EngineConfig, model: str) -> EngineConfig:
    """The options for a MODEL or MODEL=TYPE. The embedded model goes by the name that the server shows."""
    name, _, score_type = model.rpartition("=")
    if name and score_type in typing.get_args(typing.get_type_hints(EngineConfig)["score_type"]):
        model, config = name, replace(config, score_type=cast("Any", score_type))
    return replace(config, model=None if model == shown_name(None) else model)


def _in_new_process(config: EngineConfig, judged: Judged) -> tuple[Ranked, int]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_rank, config, judged).result()
        except BrokenProcessPool:
            raise click.ClickException("its process was killed; it may need more memory") from None


# Each column's heading and digits, where they are not its name and 4.
_COLUMNS = {
    "documents_per_s": ("documents/s", 1),
    "ms_per_query": ("ms/query", 1),
    "memory_mb": ("memory, MB", 0),
    "agreement": ("agreement", 3),
}


def _cell(name: str, value: Any) -> str:
    if name.endswith(", p"):
        return "" if value is None else shown_p(value)
    return f"{value:.{_COLUMNS.get(name, ('', 4))[1]}f}" if isinstance(value, float) else str(value)


def _table(rows: list[dict[str, Any]]) -> str:
    names = [*rows[-1]]
    cells = [[_COLUMNS.get(name, (name,))[0] for name in names]]
    cells += [[_cell(name, row.get(name)) for name in names] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    lines = []
    for row in cells:
        texts = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join([*texts, *numbers]).rstrip())
    return "\n".join(lines)
