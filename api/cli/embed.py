"""`maxsimd embed`: the vectors of a file's texts."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import numpy as np
from numpy.typing import NDArray

from maxsimd.api.cli.files import (
    OutputPath,
    Progress,
    Record,
    each_part,
    field_option,
    in_parts,
    input_format_option,
    model_argument,
    open_output,
    read_records,
    run,
)
from maxsimd.api.help import Command
from maxsimd.api.options import config_file_option, config_from, options_from
from maxsimd.engine.config import EngineConfig

if TYPE_CHECKING:
    from maxsimd.engine import Engine
    from maxsimd.engine.requests import EmbedResult, InputType, TokenEmbedResult

    _Result: TypeAlias = EmbedResult | TokenEmbedResult

# float32 [dim] or [tokens, dim] for each text.
Rows = list[NDArray[np.float32]]


@click.command(cls=Command)
@model_argument
@click.option(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    required=True,
    help="File with the texts: lines, JSONL, CSV, TSV or Parquet; - for stdin",
)
@input_format_option
@field_option
@click.option(
    "--input-type",
    type=click.Choice(["query", "document"]),
    metavar="TYPE",
    help="Prompt to read the texts with: query or document",
)
@click.option("--tokens", is_flag=True, help="Return one vector per token instead of per text")
@click.option(
    "--out",
    type=OutputPath(),
    help="File to write: .npy, or .npz with embeddings and offsets for --tokens",
    show_default="print JSON lines",
)
@config_file_option
@options_from(EngineConfig, exclude=frozenset({"model"}))
def embed(**values: Any) -> None:
    """Embed the texts of a file with MODEL."""
    config = config_from(EngineConfig, values)
    out = None if values["out"] is None else Path(values["out"])
    ending = ".npz" if values["tokens"] else ".npy"
    if out is not None and out.suffix != ending:
        raise click.UsageError(
            f"--out must end in {ending} {'with' if values['tokens'] else 'without'} --tokens"
        )
    click.echo(f"reading {values['texts']}", err=True)
    records = read_records(values["texts"], values["input_format"], values["field"])
    options = (records, values["input_type"], values["tokens"])
    found = run(config, "texts", len(records), lambda engine, progress: _embed(engine, progress, *options))
    if out is None:
        for index, (record, rows) in enumerate(zip(records, found, strict=True)):
            named = {} if record.id is None else {"id": record.id}
            click.echo(json.dumps({"index": index, **named, "embedding": rows.tolist()}))
        return
    with open_output(out) as file:
        if values["tokens"]:
            offsets = np.array([0, *accumulate(map(len, found))])
            np.savez(file, embeddings=np.concatenate(found), offsets=offsets)
        else:
            np.save(file, np.stack(found))


async def _embed(
    engine: "Engine",
    progress: Progress,
    records: Sequence[Record],
    input_type: "InputType | None",
    tokens: bool,
) -> Rows:
    found: dict[int, NDArray[np.float32]] = {}

    async def ask(part: list[int]) -> "_Result":
        texts = [records[i].text for i in part]
        if tokens:
            return await engine.embed_tokens(
                texts, input_type=input_type, priority="batch", return_tokens=False
            )
        return await engine.embed(texts, input_type=input_type, priority="batch")

    def done(part: list[int], result: "_Result") -> None:
        found.update(zip(part, result.embeddings, strict=True))

    progress.add(0)
    await each_part(progress, in_parts(records, range(len(records))), ask, done)
    return [found[i] for i in range(len(records))]
