"""`maxsimd embed`: the vectors of a file's texts."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from maxsimd.api.commands.progress import Progress
from maxsimd.api.commands.records import KINDS, Record, read_records
from maxsimd.api.options import config_file_option, config_from, options_from
from maxsimd.engine.config import EngineConfig, shown_name

_INTERRUPTED = 130


@click.command()
@click.argument("model", required=False, envvar="MAXSIMD_MODEL")
@click.option(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    required=True,
    help="File with the texts: lines, JSONL, CSV, TSV or Parquet; - for standard input.",
)
@click.option("--input-format", type=click.Choice(KINDS), help="How to read it; else its ending says it.")
@click.option("--field", multiple=True, help="Field or column with the text; repeatable, joined by a space.")
@click.option("--input-type", type=click.Choice(["query", "document"]), help="Behind which prompt to read.")
@click.option("--tokens", is_flag=True, help="A vector a token, not one a text.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="File to write: .npy (float32 [texts, dim]), or .npz with embeddings [tokens, dim] and offsets; "
    "without one, JSON lines are printed.",
)
@config_file_option
@options_from(EngineConfig, exclude=frozenset({"model"}))
def embed(**values: Any) -> None:
    """Embeds the texts of a file with MODEL."""
    config = config_from(EngineConfig, values)
    out = None if values["out"] is None else Path(values["out"])
    ending = ".npz" if values["tokens"] else ".npy"
    if out is not None and out.suffix != ending:
        raise click.UsageError(
            f"--out must end in {ending} {'with' if values['tokens'] else 'without'} --tokens"
        )
    progress = Progress(0, "texts")
    progress.note(f"reading {values['texts']}")
    records = read_records(values["texts"], values["input_format"], values["field"])
    progress.total = len(records)
    progress.note(f"Loading {shown_name(config.model)} for {len(records):,} texts ...")
    from maxsimd.api.commands.embedding_texts import embed_records, write_array, write_arrays
    from maxsimd.api.commands.running import Interrupted, run

    try:
        found = run(embed_records(config, records, values["input_type"], values["tokens"], progress))
    except Interrupted:
        click.echo("interrupted: nothing is written", err=True)
        sys.exit(_INTERRUPTED)
    finally:
        progress.end()
    if out is None:
        for index, (record, rows) in enumerate(zip(records, found, strict=True)):
            click.echo(_line(index, record, rows.tolist()))
    elif values["tokens"]:
        write_arrays(out, found)
    else:
        write_array(out, found)


def _line(index: int, record: Record, rows: list[Any]) -> str:
    named = {} if record.id is None else {"id": record.id}
    return json.dumps({"index": index, **named, "embedding": rows})
