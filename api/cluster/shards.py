"""The input of `maxsimd cluster score` in numbered shards of rows, and how a shard is read, scored and
written.

A shard is complete or not there: it is written under another name, which readers of folders pass over, and
then renamed. A shard that is scored twice, because an actor or the driver died, is written twice under one
name."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from maxsimd.api.cluster.data import Row
from maxsimd.api.cluster.rows import ScoreRow

# Readers of folders pass over names that begin with a dot.
TEMPORARY = ".part-"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of one file: `rows` of them from the row `first` on. `offset` is where that row begins in the
    file, in bytes, for formats in which it can be looked up."""

    number: int
    path: str
    first: int
    rows: int
    offset: int = 0

    def name(self, ending: str) -> str:
        """Of its file in the output; in alphabetical order the names are in the order of the input."""
        return f"part-{self.number:08d}{ending}"


@dataclass(frozen=True, slots=True)
class Counts:
    """What was in a shard: rows, those with an error, and the tokens that were read."""

    rows: int
    errors: int
    prompt_tokens: int

    @classmethod
    def of(cls, columns: list[Row]) -> "Counts":
        """From what was added to each row."""
        errors = sum(row["error"] is not None for row in columns)
        return cls(len(columns), errors, sum(row["prompt_tokens"] for row in columns))


class Scorer(Protocol):
    """What `ScoreRows` does with rows."""

    def read(self, rows: list[Row]) -> list[ScoreRow]: ...

    def score(self, rows: list[ScoreRow]) -> list[Row]: ...


class Format(Protocol):
    """A kind of files. `ending` is that of its files in the output."""

    ending: str

    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int, int]]:
        """The first row, the number of rows and the offset of each shard of a file. Raises ValueError for a
        file of another kind."""
        ...

    def check(self, path: Path, has_query: bool) -> None:
        """Raises ValueError where no row of a file can be scored; `has_query` where all rows have one in
        common."""
        ...

    def score(self, shard: Shard, scorer: Scorer, out: Path) -> Counts:
        """Scores a shard into the file `out`."""
        ...


def write_shard(format: Format, shard: Shard, scorer: Scorer, folder: Path) -> Counts:
    """Scores a shard into its file in the folder, as a whole or not at all."""
    temporary = folder / f"{TEMPORARY}{shard.number:08d}-{uuid4().hex}"
    try:
        counts = format.score(shard, scorer, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(folder / shard.name(format.ending))
    finally:
        temporary.unlink(missing_ok=True)
    return counts


def remove_unfinished(folder: Path) -> None:
    """Removes what was being written when a run was ended."""
    for path in folder.glob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)


def cut_files(format: Format, files: list[Path], rows: int) -> list[Shard]:
    """Shards of at most `rows` rows each, in the order of the files and of the rows in them; none has rows of
    two files. Raises ValueError for a file of another kind."""
    shards: list[Shard] = []
    for path in files:
        for first, count, offset in format.cut(path, rows):
            shards.append(Shard(len(shards), str(path), first, count, offset))
    return shards
