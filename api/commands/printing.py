"""Scores on standard output or in a file: a table for people, JSON lines for programs."""

import json
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click

from maxsimd.api.commands.records import Record

_LEAST_TEXT = 20


def write(
    ranked: Sequence[int],
    scores: Mapping[int, float],
    errors: Mapping[int, str],
    records: Sequence[Record],
    form: str | None,
    out: str | None,
) -> None:
    """Writes documents by their indexes in this order, into the file `out` if one is named. `form` is table
    or jsonl; by default a table in a terminal."""
    if form is None:
        form = "table" if out is None and sys.stdout.isatty() else "jsonl"
    lines = (_table if form == "table" else _json_lines)(ranked, scores, errors, records)
    if out is None:
        for line in lines:
            click.echo(line)
        return
    with open_output(Path(out)) as file:
        file.writelines(f"{line}\n".encode() for line in lines)


def is_plain(path: Path) -> bool:
    """Whether a file can be replaced: it is no device and no pipe, and need not be there yet."""
    return path.is_file() or not path.exists()


@contextmanager
def open_output(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing. A regular file, or the target of a link, is replaced as a whole at the end;
    devices and pipes are written directly. Raises click.ClickException if the file cannot be written."""
    try:
        if not is_plain(path):
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()
        beside = target.with_name(f"{target.name}.new")
        try:
            with beside.open("wb") as file:
                yield file
            beside.replace(target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise click.ClickException(
            f"cannot write {path}: {(error.strerror or str(error)).lower()}"
        ) from error


def _json_lines(
    ranked: Sequence[int], scores: Mapping[int, float], errors: Mapping[int, str], records: Sequence[Record]
) -> Iterator[str]:
    for index in ranked:
        record = records[index]
        line: dict[str, object] = {"index": index}
        if record.id is not None:
            line["id"] = record.id
        if index in errors:
            line["error"] = errors[index]
        else:
            line["score"] = scores[index]
        yield _writable(json.dumps({**line, "text": record.text}, ensure_ascii=False))


def _table(
    ranked: Sequence[int], scores: Mapping[int, float], errors: Mapping[int, str], records: Sequence[Record]
) -> Iterator[str]:
    ids = [_printable(records[index].id or str(index)) for index in ranked]
    width = max([len("document"), *map(_width, ids)])
    rest = max(_LEAST_TEXT, shutil.get_terminal_size((100, 24)).columns - width - 20)
    yield f"{'rank':>4}  {'score':>10}  {_filled('document', width)}  text"
    for rank, (index, id_) in enumerate(zip(ranked, ids, strict=True), 1):
        score = "failed" if index in errors else f"{scores[index]:.4f}"
        shown = _printable(" ".join((errors.get(index) or records[index].text)[: 4 * rest].split()))
        yield f"{rank:>4}  {score:>10}  {_filled(id_, width)}  {_cut(shown, rest)}"


def _writable(text: str) -> str:
    """The text as UTF-8 can have it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _printable(text: str) -> str:
    """The text without what would move a terminal's cursor."""
    return "".join(each for each in _writable(text) if unicodedata.category(each) != "Cc")


def _width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1
        for each in text
    )


def _filled(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def _cut(text: str, most: int) -> str:
    if _width(text) <= most:
        return text
    while _width(text) > most - 3:
        text = text[: -max(1, (_width(text) - most + 3) // 2)]
    return text + "..."
