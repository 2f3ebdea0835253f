"""Shards of JSON lines. Blank lines are no rows; a line that is no JSON object is a row with an error."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from maxsimd.api.cluster.data import Row
from maxsimd.api.cluster.shards import Counts, Scorer, Shard


class JsonlShards:
    """See `Format`."""

    ending = ".jsonl"

    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int, int]]:
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

    def check(self, path: Path, has_query: bool) -> None:
        """By the first row; others may differ, and have errors then."""
        with path.open("rb") as file:
            line = next((line for line in file if line.strip()), None)
        row = None if line is None else _read(line)
        if isinstance(row, str):
            raise ValueError(f"{path} is no JSONL: its first line {row}")
        if row is not None and not has_query and "query" not in row:
            raise ValueError(f"{path} has no field query; give --query")
        if row is not None and not {"documents", "document"} & row.keys():
            raise ValueError(f"{path} has neither a field documents nor document, but {', '.join(row)}")

    def score(self, shard: Shard, scorer: Scorer, out: Path) -> Counts:
        with Path(shard.path).open("rb") as file:
            file.seek(shard.offset)
            found = [_read(line) for line in islice((line for line in file if line.strip()), shard.rows)]
        if len(found) < shard.rows:
            raise ValueError(f"{shard.path} has changed: rows {shard.first} and following are not there")
        added = iter(scorer.score(scorer.read([row for row in found if not isinstance(row, str)])))
        columns = [
            {"error": row, "prompt_tokens": 0} if isinstance(row, str) else next(added) for row in found
        ]
        with out.open("w", encoding="ascii") as file:
            for row, new in zip(found, columns, strict=True):
                old = {} if isinstance(row, str) else row
                file.write(json.dumps({**old, **new}) + "\n")
        return Counts.of(columns)


def _read(line: bytes) -> Row | str:
    """A line's object, or why it is none."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"is no JSON: {error}"
    return row if isinstance(row, dict) else f"is no JSON object but {type(row).__name__}"
