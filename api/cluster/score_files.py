"""Scores files on Ray Data: a row of the data set is a shard of the input, which an actor reads, scores and
writes, so that no text goes through Ray."""

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from uuid import uuid4

import click

from maxsimd.api.cli.files import digest_of
from maxsimd.api.cluster.data import (
    ActorPool,
    Row,
    ScoreRows,
    added_columns,
    with_columns,
)
from maxsimd.api.cluster.session import last_line
from maxsimd.engine import EngineConfig, MaxsimdError

if TYPE_CHECKING:
    import pyarrow as pa


# Readers of folders pass over names that begin with a dot.
TEMPORARY = ".part-"


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of one file, from the row `first` on, which begins at the byte `offset` where the
    format can seek."""

    number: int
    path: str
    first: int
    rows: int
    offset: int = 0

    def name(self, ending: str) -> str:
        """The output file's name; names sort in the order of the input."""
        return f"part-{self.number:08d}{ending}"


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows, rows with an error, and tokens of a shard."""

    rows: int
    errors: int
    prompt_tokens: int

    @classmethod
    def of(cls, columns: list[Row]) -> "Counts":
        errors = sum(row["error"] is not None for row in columns)
        return cls(len(columns), errors, sum(row["prompt_tokens"] for row in columns))


class JsonlShards:
    """JSON lines. Blank lines are no rows; a line that is no object is a row with an error."""

    ending = ".jsonl"  # of files in the output
    field = "field"  # in errors

    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int, int]]:
        """First row, number of rows and offset of each shard."""
        first = count = begin = offset = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    if count == rows:
                        yield first, count, begin
                        first, count, begin = first + count, 0, offset
                    count += 1
                offset += len(line)
        if count:
            yield first, count, begin

    def names(self, path: Path) -> list[str] | None:
        """The fields of the first row; others may differ and have errors. None without rows. Raises
        ValueError for another kind of file."""
        with path.open("rb") as file:
            line = next((line for line in file if line.strip()), None)
        row = {} if line is None else _read_object(line)
        if isinstance(row, str):
            raise ValueError(f"{path} is no JSONL: its first line {row}")
        return None if line is None else [*row]

    def score(self, shard: Shard, scorer: ScoreRows, out: Path) -> Counts:
        with Path(shard.path).open("rb") as file:
            file.seek(shard.offset)
            found = [
                _read_object(line) for line in islice((line for line in file if line.strip()), shard.rows)
            ]
        if len(found) < shard.rows:
            raise ValueError(f"{shard.path} has changed: rows {shard.first} and following are not there")
        added = iter(scorer.score([row for row in found if not isinstance(row, str)]))
        columns = [
            {"error": row, "prompt_tokens": 0} if isinstance(row, str) else next(added) for row in found
        ]
        with out.open("w", encoding="ascii") as file:
            for row, new in zip(found, columns, strict=True):
                old = {} if isinstance(row, str) else row
                file.write(json.dumps({**old, **new}) + "\n")
        return Counts.of(columns)


def _read_object(line: bytes) -> Row | str:
    """A line's object, or an error."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}"
    return row if isinstance(row, dict) else f"is no JSON object but {type(row).__name__}"


class ParquetShards:
    """Parquet; reads a row group no further than needed."""

    ending = ".parquet"
    field = "column"

    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int, int]]:
        from pyarrow.parquet import read_metadata

        total = read_metadata(path).num_rows
        for first in range(0, total, rows):
            yield first, min(rows, total - first), 0

    def names(self, path: Path) -> list[str] | None:
        from pyarrow.parquet import read_schema

        return [*read_schema(path).names]

    def score(self, shard: Shard, scorer: ScoreRows, out: Path) -> Counts:
        from pyarrow.parquet import write_table

        table = _read_table(shard)
        used = [name for name in ("query", "documents", "document") if name in table.column_names]
        columns = scorer.score(table.select(used).to_pylist())
        write_table(with_columns(table, added_columns(table), columns), out)
        return Counts.of(columns)


def _read_table(shard: Shard) -> "pa.Table":
    """Raises ValueError where the file has fewer rows than it had."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    with ParquetFile(shard.path) as file:
        groups: list[int] = []
        start = end = 0
        for number in range(file.num_row_groups):
            begin, end = end, end + file.metadata.row_group(number).num_rows
            if begin < shard.first + shard.rows and end > shard.first:
                start = begin if not groups else start
                groups.append(number)
        skipped, parts, missing = shard.first - start, [], shard.rows
        for batch in file.iter_batches(batch_size=shard.rows, row_groups=groups):
            part = batch.slice(skipped, missing)
            skipped = max(0, skipped - batch.num_rows)
            missing -= part.num_rows
            parts.append(part)
            if not missing:
                break
        if missing:
            raise ValueError(f"{shard.path} has changed: rows {shard.first} and following are not there")
        return pa.Table.from_batches([part for part in parts if part.num_rows], file.schema_arrow)


Format: TypeAlias = JsonlShards | ParquetShards
_FORMATS: dict[str, type[JsonlShards] | type[ParquetShards]] = {
    ".parquet": ParquetShards,
    ".jsonl": JsonlShards,
    ".ndjson": JsonlShards,
    ".json": JsonlShards,
}


def write_shard(format: Format, shard: Shard, scorer: ScoreRows, folder: Path) -> Counts:
    """Scores a shard into its file, as a whole or not at all."""
    temporary = folder / f"{TEMPORARY}{shard.number:08d}-{uuid4().hex}"
    try:
        counts = format.score(shard, scorer, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(folder / shard.name(format.ending))
    finally:
        temporary.unlink(missing_ok=True)
    return counts


@dataclass(frozen=True, slots=True)
class Files:
    """Input files of one kind, in order, and their folder or the one file."""

    path: Path
    files: list[Path]
    format: Format

    @classmethod
    def of(cls, path: Path) -> "Files":
        """A file, or the files in a folder and its subfolders, by name. Raises ValueError for none or mixed
        kinds."""
        path = path.resolve()
        found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
        # Readers of folders pass over hidden files.
        names = {each: each.relative_to(path).parts for each in found if each.suffix.lower() in _FORMATS}
        files = [each for each, parts in names.items() if not any(part[0] in "._" for part in parts)]
        if not files:
            raise ValueError(
                f"there is no Parquet and no JSONL in {path}: names must end in {', '.join(_FORMATS)}"
            )
        formats = {_FORMATS[each.suffix.lower()] for each in files}
        if len(formats) > 1:
            raise ValueError(f"{path} has both Parquet and JSONL; give one of them")
        return cls(path, files, formats.pop()())


@dataclass(frozen=True, slots=True)
class Work:
    """A run's input: `query` is the query of all rows, if given; `options` are those of `ScoreRows`."""

    config: EngineConfig
    files: Files
    query: str | None
    options: dict[str, Any]
    shard_rows: int

    def digest(self) -> str:
        """Identifies runs with the same rows and shards. Sizes and times of files stand for their rows."""
        config = replace(self.config, threads=None)
        query = "" if self.query is None else f"={self.query}"
        parts = [repr(config), query, repr(sorted(self.options.items())), str(self.shard_rows)]
        found = [(each.relative_to(self.files.path), each.stat()) for each in self.files.files]
        return digest_of([*parts, *(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found)])

    def shards(self) -> list[Shard]:
        """Shards of at most `shard_rows` rows, in order; none spans two files. Raises ValueError for files
        that cannot be read or scored."""
        format, shards = self.files.format, list[Shard]()
        for path in self.files.files:
            names = format.names(path)
            if names is not None and self.query is None and "query" not in names:
                raise ValueError(f"{path} has no {format.field} query; give --query")
            if names is not None and not {"documents", "document"} & {*names}:
                there = ", ".join(names)
                raise ValueError(f"{path} has neither a {format.field} documents nor document, but {there}")
            for first, count, offset in format.cut(path, self.shard_rows):
                shards.append(Shard(len(shards), str(path), first, count, offset))
        return shards


class ScoringError(Exception):
    """A shard cannot be read, scored or written; the message is one line."""


class ScoreShards:
    """Scores the shards that a table names, in an actor. Thread-safe."""

    def __init__(
        self, config: EngineConfig, query: str | None, format: Format, out: str, options: Row
    ) -> None:
        """`out` is the output folder, the same on all machines. A model that cannot be loaded is reported by
        each call: Ray would retry for ever."""
        try:
            self._scorer: ScoreRows | MaxsimdError = ScoreRows(config, query, **options)
        except MaxsimdError as error:
            self._scorer = error
        self._format = format
        self._out = Path(out)

    def __call__(self, table: "pa.Table") -> "pa.Table":
        """A row a shard: the fields of `Counts`, or `failure`."""
        import pyarrow as pa

        shards = [Shard(**row) for row in table.to_pylist()]
        types = pa.schema({name: pa.int64() for name in Counts.__annotations__} | {"failure": pa.string()})
        return pa.Table.from_pylist([self._scored(shard) for shard in shards], types)

    def _scored(self, shard: Shard) -> Row:
        if isinstance(self._scorer, MaxsimdError):
            return {"failure": str(self._scorer)}
        try:
            return asdict(write_shard(self._format, shard, self._scorer, self._out))
        except (OSError, ValueError) as error:
            return {"failure": str(error)}


def score_shards(work: Work, shards: list[Shard], pool: ActorPool, out: Path) -> Iterator[Counts]:
    """Counts of each shard as it is done; Ray must be running. Raises ScoringError."""
    import ray

    arguments = {
        "config": replace(work.config, threads=pool.num_cpus),
        "query": work.query,
        "format": work.files.format,
        "out": str(out.resolve()),
        "options": work.options,
    }
    # A shard is a block, and so a task.
    rows = ray.data.from_items([asdict(shard) for shard in shards], override_num_blocks=len(shards))
    try:
        for row in pool.map_batches(rows, ScoreShards, arguments, None).iter_rows():
            if (failure := row.pop("failure")) is not None:
                raise ScoringError(failure)
            yield Counts(**row)
    except ray.exceptions.RayActorError as error:
        reason = f"an actor has died several times at the same rows: {last_line(str(error))}"
        raise ScoringError(reason) from error
    except ray.exceptions.RayError as error:
        raise ScoringError(last_line(str(error))) from error


_VERSION = 1
# Readers of folders of Parquet pass over names that begin so.
_RUN = "_run.json"


class RunFolder:
    """Owns the output folder while it is entered: no other run on this machine can write it."""

    def __init__(self, path: Path, digest: str, ending: str, resume: bool) -> None:
        """`digest` identifies the run. Raises click.ClickException for a folder with anything else, one of
        another run, and one of this run without `resume`."""
        self.path = path
        self._ending = ending
        self._digest = digest
        if path.exists() and not path.is_dir():
            raise click.ClickException(f"{path} is no folder")
        path.mkdir(parents=True, exist_ok=True)
        if not (path / _RUN).exists():
            if any(not each.name.startswith(TEMPORARY) for each in path.iterdir()):
                raise click.ClickException(f"{path} is not empty; name an empty folder, or a new one")
            return
        try:
            found = json.loads((path / _RUN).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{path / _RUN} cannot be read: {error}") from error
        if found != {"maxsimd": _VERSION, "digest": digest}:
            raise click.ClickException(
                f"{path} belongs to another run: another model, input, query or options; "
                "remove it, or name another folder"
            )
        if not resume:
            raise click.ClickException(
                f"{path} has rows of such a run; go on with --resume, or name another folder"
            )

    def __enter__(self) -> Self:
        """Raises click.ClickException where another run is writing the folder."""
        self._lock = os.open(self.path, os.O_RDONLY)  # holds the folder's lock until it is closed
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise click.ClickException(f"{self.path} is being written by another run") from error
        self._remove_unfinished()
        if not (self.path / _RUN).exists():
            temporary = self.path / f"{TEMPORARY}{_RUN}"
            temporary.write_text(
                json.dumps({"maxsimd": _VERSION, "digest": self._digest}) + "\n", encoding="utf-8"
            )
            temporary.replace(self.path / _RUN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_unfinished()
        os.close(self._lock)

    def _remove_unfinished(self) -> None:
        for path in self.path.glob(f"{TEMPORARY}*"):
            path.unlink(missing_ok=True)

    def left(self, shards: list[Shard]) -> list[Shard]:
        """The shards that are not written yet."""
        written = {path.name for path in self.path.iterdir()}
        return [shard for shard in shards if shard.name(self._ending) not in written]
