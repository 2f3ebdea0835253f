"""The shards of an input, and the folder from which an interrupted run goes on."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import parquet

from maxsimd.api.cluster import score_files
from maxsimd.api.cluster.score_files import Files, JsonlShards, RunFolder, Shard, Work, write_shard
from maxsimd.engine import EngineConfig


class Lengths:
    def score(self, rows: list[dict[str, Any]]) -> list[dict[str, object]]:
        return [{"score": len(row["document"]), "error": None, "prompt_tokens": 1} for row in rows]


def _input(folder: Path, kind: str, rows: int) -> Path:
    path = folder / f"in.{kind}"
    texts = ["x" * i for i in range(rows)]
    if kind == "parquet":
        parquet.write_table(pa.table({"document": texts}), path, row_group_size=7)
    else:
        path.write_text("".join(f'\n {{"document": "{text}"}}\r\n' for text in texts))
    return path


@pytest.mark.parametrize("rows", [9, 10, 47])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_shards_have_every_row_once_and_in_order(tmp_path: Path, kind: str, rows: int) -> None:
    format: score_files.Format = score_files.ParquetShards() if kind == "parquet" else JsonlShards()
    shards = Work(EngineConfig(), Files.of(_input(tmp_path, kind, rows)), "q", {}, 10).shards()
    assert [shard.rows for shard in shards] == [10] * (rows // 10) + [rows % 10] * (rows % 10 > 0)
    out = tmp_path / "out"
    out.mkdir()
    counts = [write_shard(format, shard, Lengths(), out) for shard in reversed(shards)]
    assert sum(each.rows for each in counts) == rows
    files = sorted(out.iterdir())
    if kind == "parquet":
        found = [score for file in files for score in parquet.read_table(file)["score"].to_pylist()]
    else:
        found = [json.loads(line)["score"] for file in files for line in file.read_text().splitlines()]
    assert found == [*range(rows)]


def test_a_shard_is_complete_or_not_there(tmp_path: Path) -> None:
    class Failing(Lengths):
        def score(self, rows: list[dict[str, Any]]) -> list[dict[str, object]]:
            raise OSError("no room")

    path = _input(tmp_path, "jsonl", 3)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(OSError, match="no room"):
        write_shard(JsonlShards(), Shard(0, str(path), 0, 3), Failing(), out)
    with pytest.raises(ValueError, match="has changed"):
        write_shard(JsonlShards(), Shard(0, str(path), 0, 4), Lengths(), out)
    assert list(out.iterdir()) == []
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="its first line is no JSON: maximum recursion"):
        JsonlShards().names(path)


def _folder(path: Path, digest: str = "a", resume: bool = True) -> RunFolder:
    return RunFolder(path, digest, ".jsonl", resume)


def test_a_run_goes_on_with_what_is_left(tmp_path: Path) -> None:
    shards = [Shard(i, "x", 0, 1) for i in range(3)]
    out = tmp_path / "out"
    with _folder(out, resume=False) as folder:
        assert folder.left(shards) == shards
        (out / shards[1].name(".jsonl")).touch()
    (out / ".part-00000002-of-a-dead-process").touch()
    with _folder(out) as folder:
        assert folder.left(shards) == [shards[0], shards[2]]
    assert sorted(path.name for path in out.iterdir()) == ["_run.json", "part-00000001.jsonl"]


def test_other_runs_and_other_folders_are_refused(tmp_path: Path) -> None:
    with _folder(tmp_path / "out") as _:
        with pytest.raises(click.ClickException, match="go on with --resume"):
            _folder(tmp_path / "out", resume=False)
        with pytest.raises(click.ClickException, match="belongs to another run"):
            _folder(tmp_path / "out", digest="b")
        with pytest.raises(click.ClickException, match="is being written by another run"):
            _folder(tmp_path / "out").__enter__()
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").touch()
    with pytest.raises(click.ClickException, match="is not empty"):
        _folder(tmp_path / "letters")
    with pytest.raises(click.ClickException, match="is no folder"):
        _folder(tmp_path / "letters" / "a.txt")


def test_a_run_is_known_by_all_that_changes_its_output(tmp_path: Path) -> None:
    path = _input(tmp_path, "jsonl", 3)

    def digest(config: EngineConfig = EngineConfig(), query: str | None = None, rows: int = 10) -> str:  # noqa: B008
        return Work(config, Files.of(path), query, {}, rows).digest()

    first = digest()
    assert digest(EngineConfig(threads=7)) == first
    others = [digest(EngineConfig(dtype="float32")), digest(query=""), digest(query="a"), digest(rows=11)]
    path.write_text(path.read_text() + "{}\n")
    assert len({first, *others, digest()}) == 6


def test_files_that_hold_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Parquet and no JSONL"):
        Files.of(tmp_path)
    path = _input(tmp_path, "jsonl", 3)
    with pytest.raises(ValueError, match="no field query; give --query"):
        Work(EngineConfig(), Files.of(path), None, {}, 10).shards()
    _input(tmp_path, "parquet", 3)
    with pytest.raises(ValueError, match="both Parquet and JSONL"):
        Files.of(tmp_path)
