"""`maxsimd rerank` and `maxsimd score`: the documents of a file for a query, best first or in their order."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from maxsimd.api.cli.files import (
    INTERRUPTED,
    Interrupted,
    OutputPath,
    Progress,
    Record,
    combined,
    digest_of,
    each_part,
    field_option,
    in_parts,
    input_format_option,
    is_plain,
    long_documents_option,
    model_argument,
    normalize_option,
    open_output,
    read_records,
    run,
    truncation_of,
)
from maxsimd.api.help import Command
from maxsimd.api.options import config_file_option, config_from, options_from
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.display import printable
from maxsimd.engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from maxsimd.engine import Engine, ScoreResult

_LEAST_TEXT, _MOST_EXPLAINED = 20, 10


def write(
    ranked: Sequence[int], journal: "Journal", records: Sequence[Record], form: str | None, out: str | None
) -> None:
    """Writes documents in this order, into the file `out` if given. `form` is table or jsonl; the default is
    a table in a terminal."""
    if form is None:
        form = "table" if out is None and sys.stdout.isatty() else "jsonl"
    lines = (_score_table if form == "table" else _json_lines)(ranked, journal, records)
    if out is None:
        for line in lines:
            click.echo(line)
        return
    with open_output(Path(out)) as file:
        file.writelines(f"{line}\n".encode() for line in lines)


def _json_lines(ranked: Sequence[int], journal: "Journal", records: Sequence[Record]) -> Iterator[str]:
    for index in ranked:
        record = records[index]
        line: dict[str, object] = {"index": index}
        if record.id is not None:
            line["id"] = record.id
        if index in journal.errors:
            line["error"] = journal.errors[index]
        else:
            line["score"] = journal.scores[index]
        if index in journal.matches:
            line["matches"] = journal.matches[index]
        text = json.dumps({**line, "text": record.text}, ensure_ascii=False)
        yield text.encode("utf-8", "replace").decode("utf-8")


def _score_table(ranked: Sequence[int], journal: "Journal", records: Sequence[Record]) -> Iterator[str]:
    from rich.cells import cell_len, set_cell_size

    ids = [printable(records[index].id or str(index)) for index in ranked]
    width = max([len("document"), *map(cell_len, ids)])
    rest = max(_LEAST_TEXT, shutil.get_terminal_size((100, 24)).columns - width - 20)
    yield f"{'rank':>4}  {'score':>10}  {'document':<{width}}  text"
    for rank, (index, id_) in enumerate(zip(ranked, ids, strict=True), 1):
        score = "failed" if index in journal.errors else f"{journal.scores[index]:.4f}"
        shown = printable(" ".join((journal.errors.get(index) or records[index].text)[: 4 * rest].split()))
        shown = shown if cell_len(shown) <= rest else f"{set_cell_size(shown, rest - 3)}..."
        yield f"{rank:>4}  {score:>10}  {set_cell_size(id_, width)}  {shown}"
        if index in journal.matches:
            pairs = [f"{asked} = {found} ({each:.2f})" for asked, found, each in journal.matches[index]]
            yield printable(f"      {', '.join(pairs)}")


_options = combined(
    model_argument,
    config_file_option,
    click.option("--query", required=True, help="Query to score the documents for"),
    click.option(
        "--documents",
        type=click.Path(exists=True, allow_dash=True),
        required=True,
        help="Lines, JSONL, CSV, TSV or Parquet (- for stdin), or a folder of pictures and PDFs",
    ),
    input_format_option,
    field_option,
    click.option("--out", type=OutputPath(), help="File to write instead of printing"),
    click.option(
        "--format",
        "form",
        type=click.Choice(["table", "jsonl"]),
        metavar="FORMAT",
        help="table or jsonl",
        show_default="table in a terminal",
    ),
    click.option("--resume", is_flag=True, help="Continue an interrupted run with the same --out"),
    normalize_option,
    long_documents_option,
    options_from(EngineConfig, exclude=frozenset({"model"})),
)


@click.command(cls=Command)
@_options
@click.option("--top-n", type=click.IntRange(min=1), metavar="N", help="Most documents to print")
@click.option("--explain", is_flag=True, help="Also show which tokens match in the 10 best")
def rerank(top_n: int | None, explain: bool, **values: Any) -> None:
    """Rank the documents of a file for a query.

    Ctrl-C prints what is scored so far. --resume continues with the same --out."""
    _run(values, sys.maxsize if top_n is None else top_n, explain)


@click.command(cls=Command)
@_options
def score(**values: Any) -> None:
    """Score the documents of a file for a query, in their order.

    Ctrl-C prints what is scored so far. --resume continues with the same --out."""
    _run(values, None)


def _run(values: dict[str, Any], top_n: int | None, explain: bool = False) -> None:
    """Writes the `top_n` best documents, best first; all in their order for None."""
    config = config_from(EngineConfig, values)
    out, form, resume = values["out"], values["form"], values["resume"]
    if resume and out is None:
        raise click.UsageError("--resume needs --out: what was scored before stands beside that file")
    if resume and not is_plain(Path(out)):
        raise click.UsageError(f"--resume needs a regular file for --out, but {out} is not one")
    click.echo(f"reading {values['documents']}", err=True)
    source = Path(values["documents"])
    if values["documents"] == "-" or not source.is_dir():
        records = read_records(values["documents"], values["input_format"], values["field"])
    elif values["input_format"] or values["field"]:
        raise click.UsageError("--input-format and --field are for files, not for a folder")
    else:
        records = records_of(source)
    options = {"normalize": values["normalize"], "truncation": truncation_of(values["long_documents"])}
    path = Path(f"{out}.part") if out is not None and is_plain(Path(out)) else None
    parts = [repr(config), values["query"], repr(sorted(options.items()))]
    journal = Journal(path, digest_of([*parts, *(each.identity for each in records)]), resume)
    if journal.done < len(records) or explain:
        given = (values["query"], records, options, journal, explain)
        run(config, "documents", len(records), lambda engine, progress: _score(engine, progress, *given))
    errors, missing = journal.errors, len(records) - journal.done
    ranked = sorted({*journal.scores, *errors}) if top_n is None else journal.best(top_n)
    if not missing or out is None:
        write(ranked, journal, records, form, out)
    for index, reason in list(errors.items())[:5]:
        click.echo(f"document {index} has no score: {reason}", err=True)
    if len(errors) > 5:
        click.echo(f"{len(errors) - 5:,} other documents have no score either", err=True)
    if not missing:
        if path is not None:
            path.unlink()
        return
    hint = "" if path is None or not journal.done else f"; {path} has the rest; continue with --resume"
    click.echo(f"interrupted with {missing:,} documents left{hint}", err=True)
    sys.exit(INTERRUPTED)


_VERSION = 2


class Journal:
    """Scores in a file beside the output, from which an interrupted run goes on: a line a document, with its
    index, score and ranking score, or null and an error. The first line has the run's digest. A run that
    ends without any leaves no file."""

    def __init__(self, path: Path | None, digest: str, resume: bool) -> None:
        """Raises click.ClickException for a file of another run, and for any without `resume`."""
        self._path = path
        self._digest = digest
        self.scores: dict[int, float] = {}
        self.ranking_scores: dict[int, float] = {}
        self.errors: dict[int, str] = {}
        # Query token, document token and similarity, of explained documents.
        self.matches: dict[int, list[tuple[str | None, str, float]]] = {}
        self._is_new = True
        if path is not None and path.exists():
            if not resume:
                raise click.ClickException(
                    f"{path} holds the scores of an interrupted run; go on with --resume, or remove it"
                )
            self._is_new = not self._read(path)

    def __enter__(self) -> Self:
        self._file = None if self._path is None else self._path.open("a", encoding="utf-8")
        if self._is_new:
            self._write({"maxsimd": _VERSION, "digest": self._digest})
            if self._file is not None:
                self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()
            if not self.done:
                self._path.unlink()

    def add(self, scores: Mapping[int, tuple[float, float]], errors: Mapping[int, str]) -> None:
        """Notes scores, each with its ranking score, and errors, by the documents' indexes."""
        self.errors |= errors
        for index, (score, by) in scores.items():
            self.scores[index], self.ranking_scores[index] = score, by
            self._write([index, score, by])
        for index, reason in errors.items():
            self._write([index, None, reason])
        if self._file is not None:
            self._file.flush()

    @property
    def done(self) -> int:
        return len(self.scores) + len(self.errors)

    def best(self, most: int) -> list[int]:
        """The indexes of scored documents, best first."""
        by = self.ranking_scores
        return sorted(by, key=lambda i: (-by[i], i))[:most]

    def _write(self, line: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")

    def _read(self, path: Path) -> bool:
        """Reads the file; False if it is empty."""
        try:
            whole, _, broken = path.read_text(encoding="utf-8").rpartition("\n")
            lines = [json.loads(line) for line in whole.split("\n") if line]
        except ValueError as error:
            raise click.ClickException(f"{path} is no file of scores; remove it ({error})") from error
        if not lines:
            path.write_text("", encoding="utf-8")
            return False
        if lines[0] != {"maxsimd": _VERSION, "digest": self._digest}:
            raise click.ClickException(
                f"{path} belongs to another run: another model, query, documents or options; remove it, or "
                "write to another file"
            )
        for index, score, last in lines[1:]:
            if score is None:
                self.errors[index] = last
            else:
                self.scores[index], self.ranking_scores[index] = score, last
        if broken:  # the process ended while it wrote
            path.write_text(whole + "\n", encoding="utf-8")
        return True


async def _score(
    engine: "Engine",
    progress: Progress,
    query: str,
    records: Sequence[Record],
    options: dict[str, Any],
    journal: Journal,
    explain: bool,
) -> None:
    """Scores what is not in the journal yet, with the options of `Engine.score`, until it is complete or
    someone asks the command to end."""
    together = engine.model.score_type.scores_together
    left = [i for i in range(len(records)) if i not in journal.scores and i not in journal.errors]
    # Some models score documents by each other.
    parts = iter([list(range(len(records)))]) if together else in_parts(records, left)
    reported: dict[str, Any] = {} if together else {"on_error": "report"}

    async def ask(part: list[int]) -> "ScoreResult":
        documents = [records[i].document for i in part]
        return await engine.score(query, documents, priority="batch", **reported, **options)

    def done(part: list[int], result: "ScoreResult") -> None:
        errors = {part[i]: reason for i, reason in result.errors.items()}
        both = zip(result.scores, result.ranking_scores, strict=True)
        scores = {part[i]: each for i, each in enumerate(both) if i not in result.errors}
        journal.add(scores, errors)

    with journal, suppress(Interrupted):
        progress.add(journal.done)
        await each_part(progress, parts, ask, done)
        if best := journal.best(_MOST_EXPLAINED) if explain else []:
            documents = [records[i].document for i in best]
            try:
                explained = await engine.score(query, documents, explain=True, **options)
            except InvalidRequestError as error:  # of a model that merges vectors
                click.echo(f"--explain: {error}", err=True)
                return
            for place, explanation in explained.explanations.items():
                journal.matches[best[place]] = [
                    (each.query_token, each.document_token or "a patch", each.similarity)
                    for each in explanation.matches
                    if each.query_span is not None
                ]
            if not any(journal.matches.values()):
                click.echo("--explain: only late interaction has matches of tokens", err=True)


_PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})
_TEXTS = frozenset({".txt", ".md"})


def records_of(folder: Path) -> list[Record]:
    """A record for each picture, text and page of a PDF in a folder, by name. Raises click.ClickException."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    seen = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    records = [record for name in seen for record in _of_file(folder / name, str(name))]
    if not records:
        raise click.ClickException(f"there is no picture, PDF or text in {folder}")
    return records


def _of_file(path: Path, name: str) -> Iterator[Record]:
    from maxsimd.engine.media import PictureAt, PictureError, pages_of

    ending = path.suffix.lower()
    if ending in _PICTURES:
        yield Record(name, name, PictureAt(path))
    elif ending == ".pdf":
        try:
            pages = pages_of(path)
        except ImportError:
            raise click.ClickException(f"{path} needs pypdfium2; pip install '.[pdf]'") from None
        except PictureError as error:
            raise click.ClickException(f"{path} {error}") from None
        for page in pages:
            label = f"{name} page {page.page + 1}"
            yield Record(label, label, page)
    elif ending in _TEXTS:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{path} cannot be read: {error}") from error
        if text.strip():
            yield Record(text, name)
