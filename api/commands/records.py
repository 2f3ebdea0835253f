"""Texts from files: lines, JSON, CSV or Parquet, or what comes in by a pipe."""

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from maxsimd.engine.media import Content, PdfPage, PictureAt

# A page takes as long as a text of this many characters, or longer.
_PAGE = 32_768
KINDS = ("lines", "jsonl", "csv", "tsv", "parquet")
_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
# Fields and columns that hold a text, and those that hold its id, the first that is there.
TEXT_FIELDS = ("text", "content", "document", "passage", "body", "abstract", "title")
_ID_FIELDS = ("_id", "id", "docid", "doc_id", "document_id")


@dataclass(frozen=True, slots=True)
class Record:
    """A text, and its id if the file has one. Of a `page` the text is what it is called."""

    text: str
    id: str | None = None
    page: "PictureAt | PdfPage | None" = None

    @property
    def document(self) -> "str | Content":
        """What is scored."""
        if self.page is None:
            return self.text
        from maxsimd.engine.media import Content

        return Content.of([self.page])

    @property
    def size(self) -> int:
        """How much it is to run, as characters of a text."""
        return len(self.text) if self.page is None else _PAGE

    @property
    def identity(self) -> str:
        """Tells it from records that would have another score."""
        if self.page is None:
            return self.text
        found = self.page.path.stat()
        return f"{self.text} {found.st_size} {found.st_mtime_ns}"


def read_records(path: str, kind: str | None, fields: Sequence[str]) -> list[Record]:
    """The texts of a file, or with - of standard input, in its order. `fields` are those of a record that
    hold its text, joined by a space; else the first of `TEXT_FIELDS`. Raises click.ClickException for what
    cannot be read, by its line."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        kind = kind or _ENDINGS.get(Path(path).suffix.lower()) or _guess(data)
        records = [*_READERS[kind](data, fields)]
    except (OSError, ValueError, csv.Error) as error:
        raise click.ClickException(f"{path} cannot be read: {error}") from error
    if not records:
        raise click.ClickException(f"there is no text in {path}")
    return records


def _guess(data: bytes) -> str:
    """Whether data without a name is JSON or plain lines."""
    return "jsonl" if data.lstrip()[:1] in (b"{", b"[") else "lines"


def _lines(data: bytes, fields: Sequence[str]) -> Iterator[Record]:
    for line in _text(data).split("\n"):
        if line.strip():
            yield Record(line.strip())


def _json(data: bytes, fields: Sequence[str]) -> Iterator[Record]:
    """An object or a text a line, or an array of them."""
    text = _text(data)
    if text.lstrip().startswith("["):
        for number, value in enumerate(json.loads(text), 1):
            yield _record(value, fields, f"entry {number}")
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON: {error}") from None
            yield _record(value, fields, f"line {number}")


def _csv(data: bytes, fields: Sequence[str]) -> Iterator[Record]:
    yield from _table(data, fields, ",")


def _tsv(data: bytes, fields: Sequence[str]) -> Iterator[Record]:
    yield from _table(data, fields, "\t")


def _table(data: bytes, fields: Sequence[str], separator: str) -> Iterator[Record]:
    """Rows under a heading."""
    csv.field_size_limit(sys.maxsize)
    for number, row in enumerate(csv.DictReader(io.StringIO(_text(data)), delimiter=separator), 2):
        yield _record(row, fields, f"row {number}")


def _parquet(data: bytes, fields: Sequence[str]) -> Iterator[Record]:
    try:
        from pyarrow import BufferReader, parquet
    except ImportError:
        raise ValueError('Parquet needs pyarrow; pip install "maxsimd[files]"') from None
    table = parquet.read_table(BufferReader(data))
    for number, row in enumerate(table.to_pylist(), 1):
        yield _record(row, fields, f"row {number}")


_READERS = {"lines": _lines, "jsonl": _json, "csv": _csv, "tsv": _tsv, "parquet": _parquet}


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error}") from None


def _record(value: Any, fields: Sequence[str], where: str) -> Record:
    if isinstance(value, str) and not fields:
        return Record(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is no object with a text but {type(value).__name__}")
    names = fields or [name for name in TEXT_FIELDS if isinstance(value.get(name), str)][:1]
    missing = [name for name in names if not isinstance(value.get(name), str)]
    if missing or not names:
        looked_for = ", ".join(missing or TEXT_FIELDS)
        there = ", ".join(map(str, value)) or "none"
        raise ValueError(f"{where} has no text in {looked_for}; it has {there}: name one with --field")
    id_ = next((value[name] for name in _ID_FIELDS if value.get(name) is not None), None)
    return Record(" ".join(value[name] for name in names), None if id_ is None else str(id_))
