"""`maxsimd eval`: how well a model ranks judged documents, by the measures of TREC."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from maxsimd.api.commands.printing import open_output
from maxsimd.api.commands.progress import Progress
from maxsimd.api.judgements import Grades, read_candidates, read_grades, read_texts
from maxsimd.api.options import config_file_option, config_from, options_from
from maxsimd.engine.config import EngineConfig, shown_name

_FILE = click.Path(exists=True, dir_okay=False)
_MEASURES = ("nDCG@10", "RR", "R@100")
_INTERRUPTED = 130

# Of each query the scores of its documents.
Run = dict[str, dict[str, float]]


@click.command("eval")
@click.argument("model", required=False, envvar="MAXSIMD_MODEL")
@config_file_option
@click.option(
    "--queries", type=_FILE, required=True, help='{"_id": ..., "text": ...} a line, or id and text.'
)
@click.option("--documents", type=_FILE, required=True, help="The same for documents, also with a title.")
@click.option("--qrels", type=_FILE, required=True, help="Judgements, as in BEIR or TREC.")
@click.option(
    "--candidates",
    type=_FILE,
    help="A run in TREC's form: of each query only its documents are ranked. By default all are.",
)
@click.option(
    "--depth", type=click.IntRange(min=1), default=100, show_default=True, help="Most candidates a query."
)
@click.option(
    "--measure",
    "measures",
    multiple=True,
    default=_MEASURES,
    show_default=True,
    help="What to measure, as ir_measures names it; repeatable. RR is the reciprocal rank (MRR as a mean).",
)
@click.option("--run", "run_file", type=click.Path(dir_okay=False), help="Write the ranking in TREC's form.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@options_from(EngineConfig, exclude=frozenset({"model"}))
def evaluate(
    queries: str, documents: str, qrels: str, measures: tuple[str, ...], as_json: bool, **values: Any
) -> None:
    """Ranks judged documents with MODEL and says how well: nDCG@10, MRR and recall, by ir_measures."""
    config = config_from(EngineConfig, values)
    measure = _measuring(measures)
    progress = Progress(0, "documents")
    progress.note(f"reading {documents}")
    try:
        grades = read_grades(qrels)
        texts, asked = read_texts(documents), read_texts(queries)
        candidates = None if values["candidates"] is None else read_candidates(values["candidates"])
        work = [*_work(grades, asked, texts, candidates, values["depth"])]
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    ranked = _ranked(config, work, asked, texts, progress)
    if values["run_file"] is not None:
        _write(ranked, values["run_file"])
    # What has no candidates counts as ranked last.
    found = measure({query: each for query, each in grades.items() if query in asked}, ranked)
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{len(ranked)} queries, {sum(map(len, ranked.values()))} ranked documents")
    for name, value in found.items():
        click.echo(f"{name:<10} {value:.4f}")


def _measuring(names: tuple[str, ...]) -> Any:
    """What measures a run. Raises click.ClickException where ir_measures is not installed, and for a measure
    that it does not know."""
    try:
        import ir_measures
    except ImportError:
        raise click.ClickException('eval needs ir_measures; pip install "maxsimd[eval]"') from None
    try:
        measures = [ir_measures.parse_measure(name) for name in names]
    except (ValueError, NameError, SyntaxError) as error:
        raise click.UsageError(f"ir_measures knows no such measure: {error}") from error

    def measure(grades: Grades, ranked: Run) -> dict[str, float]:
        qrels = {query: {id_: int(grade) for id_, grade in of.items()} for query, of in grades.items()}
        found = ir_measures.calc_aggregate(measures, qrels, ranked)
        return {str(name): float(found[name]) for name in measures}

    return measure


def _work(
    grades: Grades,
    queries: Mapping[str, str],
    documents: Mapping[str, str],
    candidates: Mapping[str, list[str]] | None,
    depth: int,
) -> Iterator[tuple[str, list[str]]]:
    """The documents to rank for each judged query. Raises ValueError where there are none."""
    some = False
    for query in grades:
        if query not in queries:
            continue
        if candidates is None:
            ids = [*documents]
        else:
            ids = [each for each in candidates.get(query, [])[:depth] if each in documents]
        if ids:
            some = True
            yield query, ids
    if not some:
        raise ValueError("no judgement names a query of the file that has documents; compare their ids")


def _ranked(
    config: EngineConfig,
    work: list[tuple[str, list[str]]],
    queries: Mapping[str, str],
    documents: Mapping[str, str],
    progress: Progress,
) -> Run:
    from maxsimd.api.commands.evaluating import rank_all
    from maxsimd.api.commands.running import Interrupted, run

    progress.total = sum(len(ids) for _, ids in work)
    progress.note(f"Loading {shown_name(config.model)} for {progress.total:,} pairs ...")
    try:
        return run(rank_all(config, work, queries, documents, progress))
    except Interrupted:
        click.echo("interrupted: there is no result", err=True)
        sys.exit(_INTERRUPTED)
    finally:
        progress.end()


def _write(ranked: Run, path: str) -> None:
    lines = []
    for query, scores in ranked.items():
        best = sorted(scores, key=lambda id_: (-scores[id_], id_))
        lines += [f"{query} Q0 {id_} {rank} {scores[id_]:.9g} maxsimd\n" for rank, id_ in enumerate(best, 1)]
    with open_output(Path(path)) as file:
        file.writelines(line.encode() for line in lines)
