"""Shards of Parquet files: a row group is read no further than it is needed."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from maxsimd.api.cluster.data import added_columns, with_columns
from maxsimd.api.cluster.shards import Counts, Scorer, Shard

if TYPE_CHECKING:
    import pyarrow as pa


class ParquetShards:
    """See `Format`."""

    ending = ".parquet"

    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int, int]]:
        from pyarrow.parquet import read_metadata

        total = read_metadata(path).num_rows
        for first in range(0, total, rows):
            yield first, min(rows, total - first), 0

    def check(self, path: Path, has_query: bool) -> None:
        from pyarrow.parquet import read_schema

        names = read_schema(path).names
        if not has_query and "query" not in names:
            raise ValueError(f"{path} has no column query; give --query")
        if not {"documents", "document"} & set(names):
            raise ValueError(f"{path} has neither a column documents nor document, but {', '.join(names)}")

    def score(self, shard: Shard, scorer: Scorer, out: Path) -> Counts:
        from pyarrow.parquet import write_table

        table = _read(shard)
        used = [name for name in ("query", "documents", "document") if name in table.column_names]
        columns = scorer.score(scorer.read(table.select(used).to_pylist()))
        write_table(with_columns(table, added_columns(table), columns), out)
        return Counts.of(columns)


def _read(shard: Shard) -> "pa.Table":
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
