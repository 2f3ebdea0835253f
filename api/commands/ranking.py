"""`maxsimd rerank` and `maxsimd score`: the documents of a file by a query, best first or in their order."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from maxsimd.api.commands.printing import is_plain, write
from maxsimd.api.commands.progress import Progress
from maxsimd.api.commands.records import KINDS, Record, read_records
from maxsimd.api.options import config_file_option, config_from, options_from
from maxsimd.engine.config import EngineConfig, shown_name

F = TypeVar("F", bound=Callable[..., Any])

# What a program returns that was ended by Ctrl-C.
_INTERRUPTED = 130
# What the engine calls what is done with long documents.
_TRUNCATION = {"truncate": "cut", "window": "window", "error": "error"}


def _options(command: F) -> F:
    """What both take."""
    for decorate in reversed(
        (
            click.argument("model", required=False, envvar="MAXSIMD_MODEL"),
            config_file_option,
            click.option("--query", required=True, help="What is looked for."),
            click.option(
                "--documents",
                type=click.Path(exists=True, allow_dash=True),
                required=True,
                help="File with the documents: lines, JSONL, CSV, TSV or Parquet; - for standard input. Or a "
                "folder of pictures, PDFs and texts: a page is a document.",
            ),
            click.option(
                "--input-format",
                type=click.Choice(KINDS),
                help="How to read the documents; by default the file's ending says it.",
            ),
            click.option(
                "--field", multiple=True, help="Field or column with the text; repeatable, joined by a space."
            ),
            click.option("--out", type=click.Path(dir_okay=False), help="File to write instead of printing."),
            click.option("--format", "form", type=click.Choice(["table", "jsonl"]), help="How to print."),
            click.option(
                "--resume", is_flag=True, help="Go on with a run that was interrupted, with the same --out."
            ),
            click.option("--normalize", is_flag=True, help="Give scores from 0 to 1."),
            click.option(
                "--long-documents",
                type=click.Choice(["truncate", "window", "error"]),
                default="truncate",
                show_default=True,
                help="What is done with documents that are longer than the model reads.",
            ),
            options_from(EngineConfig, exclude=frozenset({"model"})),
        )
    ):
        command = decorate(command)
    return command


@click.command()
@_options
@click.option("--top-n", type=click.IntRange(min=1), help="Print no more documents than this.")
def rerank(top_n: int | None, **values: Any) -> None:
    """Ranks the documents of a file for a query: a table in a terminal, JSON lines elsewhere.

    Ctrl-C prints what is scored by then. With --out, --resume goes on from there."""
    _run(values, lambda scores: sorted(scores, key=lambda i: (-scores[i], i))[:top_n])


@click.command()
@_options
def score(**values: Any) -> None:
    """Scores the documents of a file for a query, in their order.

    Ctrl-C prints what is scored by then. With --out, --resume goes on from there."""
    _run(values, None)


def _records(values: dict[str, Any]) -> list[Record]:
    path = Path(values["documents"])
    if values["documents"] == "-" or not path.is_dir():
        return read_records(values["documents"], values["input_format"], values["field"])
    if values["input_format"] or values["field"]:
        raise click.UsageError("--input-format and --field are for files, not for a folder")
    from maxsimd.api.commands.folders import records_of

    return records_of(path)


def _run(values: dict[str, Any], order: Callable[[dict[int, float]], list[int]] | None) -> None:
    config = config_from(EngineConfig, values)
    out, form, resume = values["out"], values["form"], values["resume"]
    if resume and out is None:
        raise click.UsageError("--resume needs --out: what was scored before stands beside that file")
    if resume and not is_plain(Path(out)):
        raise click.UsageError(f"--resume needs a regular file for --out, but {out} is not one")
    progress = Progress(0, "documents")
    progress.note(f"reading {values['documents']}")
    records = _records(values)
    progress.total = len(records)
    progress.note(f"Loading {shown_name(config.model)} for {len(records):,} documents ...")
    from maxsimd.api.commands.running import run
    from maxsimd.api.commands.scoring import Work, score_records

    options = {"normalize": values["normalize"], "truncation": _TRUNCATION[values["long_documents"]]}
    journal = Path(f"{out}.part") if out is not None and is_plain(Path(out)) else None
    work = Work(values["query"], records, options)
    found = run(score_records(config, work, journal, resume, progress))
    progress.end()
    ranked = sorted({*found.scores, *found.errors}) if order is None else order(found.ranking_scores)
    if found.is_complete or out is None:
        write(ranked, found.scores, found.errors, records, form, out)
    for index, reason in list(found.errors.items())[:5]:
        click.echo(f"document {index} has no score: {reason}", err=True)
    if found.is_complete:
        if journal is not None:
            journal.unlink()
        return
    missing = len(records) - len(found.scores) - len(found.errors)
    hint = "" if journal is None else f"; {journal} has the rest, --resume goes on"
    click.echo(f"interrupted with {missing:,} documents left{hint}", err=True)
    sys.exit(_INTERRUPTED)
