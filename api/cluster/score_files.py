"""Scores files on Ray Data: a row of the data set is a shard of the input, which an actor reads, scores and
writes, so that no text goes through Ray."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxsimd.api.cluster.actor_pool import ActorPool, with_threads
from maxsimd.api.cluster.data import Row, ScoreRows
from maxsimd.api.cluster.jsonl_shards import JsonlShards
from maxsimd.api.cluster.parquet_shards import ParquetShards
from maxsimd.api.cluster.ray_session import last_line
from maxsimd.api.cluster.shards import Counts, Format, Shard, cut_files, write_shard
from maxsimd.api.commands.journal import digest_of
from maxsimd.engine import EngineConfig, MaxsimdError

if TYPE_CHECKING:
    import pyarrow as pa

_FORMATS: dict[str, type[Format]] = {
    ".parquet": ParquetShards,
    ".jsonl": JsonlShards,
    ".ndjson": JsonlShards,
    ".json": JsonlShards,
}


@dataclass(frozen=True, slots=True)
class Files:
    """The input: files of one kind, in order, and their folder, or the one file itself."""

    path: Path
    files: list[Path]
    format: Format

    @classmethod
    def of(cls, path: Path) -> "Files":
        """A file, or those of a folder and the folders in it, by name. Raises ValueError where there are
        none, or of several kinds."""
        path = path.resolve()
        found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
        files = [each for each in found if each.suffix.lower() in _FORMATS and not _is_hidden(each, path)]
        if not files:
            raise ValueError(
                f"there is no Parquet and no JSONL in {path}: names must end in {', '.join(_FORMATS)}"
            )
        formats = {_FORMATS[each.suffix.lower()] for each in files}
        if len(formats) > 1:
            raise ValueError(f"{path} has both Parquet and JSONL; give one of them")
        return cls(path, files, formats.pop()())

    @property
    def identity(self) -> list[str]:
        """Tells the files from any that would have other rows."""
        found = [(each.relative_to(self.path), each.stat()) for each in self.files]
        return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found]


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be scored how: `query` is that of all rows, if they have one in common, `options` are those
    of `ScoreRows`, and `shard_rows` how many rows are scored and written together."""

    config: EngineConfig
    files: Files
    query: str | None
    options: dict[str, Any]
    shard_rows: int

    def digest(self) -> str:
        """Tells runs apart that would give other rows or other shards."""
        config = replace(self.config, threads=None)
        query = "" if self.query is None else f"={self.query}"
        parts = [repr(config), query, repr(sorted(self.options.items())), str(self.shard_rows)]
        return digest_of([*parts, *self.files.identity])

    def shards(self) -> list[Shard]:
        """Raises ValueError for files that cannot be read or scored."""
        for path in self.files.files:
            self.files.format.check(path, self.query is not None)
        return cut_files(self.files.format, self.files.files, self.shard_rows)


class ScoringError(Exception):
    """A shard cannot be read, scored or written; the message is one line."""


class ScoreShards:
    """Scores the shards that a table names, in an actor of Ray. Calls may come from several threads."""

    def __init__(
        self, config: EngineConfig, query: str | None, format: Format, out: str, options: Row
    ) -> None:
        """Loads the model; `out` is the output's folder, the same on all machines. A model that cannot be
        loaded is reported by each call: Ray would try again and again."""
        try:
            self._scorer: ScoreRows | MaxsimdError = ScoreRows(config, query, **options)
        except MaxsimdError as error:
            self._scorer = error
        self._format = format
        self._out = Path(out)

    def __call__(self, table: "pa.Table") -> "pa.Table":
        """A row a shard: the fields of `Counts`, or `failure`, which says what went wrong."""
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
    """What was in each shard, as it is done; Ray must be running. Raises ScoringError."""
    import ray

    arguments = {
        "config": with_threads(work.config, pool.num_cpus)[0],
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
