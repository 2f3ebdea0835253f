"""Scoring on Ray Data: the engine's scores, errors by row, and every row once whatever dies."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from maxsimd.api.cli import main
from maxsimd.api.cluster.data import ActorPool, EmbedRows, ScoreRows, build_scorer
from maxsimd.api.cluster.score_files import Files, ScoringError, Work, score_shards
from maxsimd.api.cluster.session import ray_session
from maxsimd.engine import EngineConfig, EngineDeadError, InvalidRequestError, SyncEngine
from tests.cluster import soak
from tests.server.conftest import installed_command

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
QUERIES = ["how is a file opened", "how is a list sorted", "what is π"]
DOCUMENTS = ["Open a file and return a stream.", "Sort a list in place.", "Käse, 東京 and 🎉.", "Read lines."]
ROWS = [{"id": f"r{i}", "query": query, "documents": DOCUMENTS[i:]} for i, query in enumerate(QUERIES)]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[Any]:
    """Ray, imported here, with two cores in a folder of its own, until the module's tests are done."""
    with ray_session(None, num_cpus=2):
        import ray

        yield ray


@pytest.fixture(scope="module")
def config(stanford_colbert: str) -> EngineConfig:
    return EngineConfig(model=stanford_colbert, dtype="float32", threads=1)


@pytest.fixture(scope="module")
def late(config: EngineConfig) -> Iterator[ScoreRows]:
    rows = ScoreRows(config)
    yield rows
    rows.close()


def _table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows))


@pytest.mark.ray
def test_a_data_set_has_the_engines_scores(local_ray: Any, config: EngineConfig) -> None:
    scored = build_scorer(config, normalize=True)(local_ray.data.from_items(ROWS)).take_all()
    with SyncEngine(config, progress=False) as engine:
        expected = {row["id"]: engine.score(row["query"], row["documents"], normalize=True) for row in ROWS}
    assert {row["id"] for row in scored} == expected.keys()
    for row in scored:
        assert row["scores"] == pytest.approx(expected[row["id"]].scores, rel=1e-6, abs=1e-6)
        assert row["prompt_tokens"] == expected[row["id"]].usage.prompt_tokens
        assert row["error"] is None
        assert row["documents"] == ROWS[int(row["id"][1:])]["documents"]


@pytest.mark.ray
@pytest.mark.exhaustive
def test_rows_are_made_of_others_and_made_into_others(local_ray: Any, config: EngineConfig) -> None:
    scorer = build_scorer(
        config, query="file", batch_size=10,
        preprocess=lambda row: {"document": row["title"] + " " + row["body"]},
        postprocess=lambda row: {"number": row["number"], "score": row["score"], "names": sorted(row)},
    )  # fmt: skip
    given = [{"number": i, "title": f"title {i}", "body": "of a file"} for i in range(25)]
    scored = scorer(local_ray.data.from_items(given)).take_all()
    with SyncEngine(config, progress=False) as engine:
        expected = engine.score("file", [f"title {i} of a file" for i in range(25)]).scores
    found = [row["score"] for row in sorted(scored, key=lambda row: row["number"])]
    assert found == pytest.approx(expected, rel=1e-6)
    names = ["number", "title", "body", "document", "score", "error", "prompt_tokens"]
    assert scored[0]["names"] == sorted(names)


class DyingRows(ScoreRows):
    """The engine of the first one dies at its first table; a file says that this has been."""

    def __init__(self, marker: str, **options: Any) -> None:
        super().__init__(**options)
        self._marker = Path(marker)

    def __call__(self, table: Any) -> Any:
        if not self._marker.exists():
            self._marker.touch()
            self._engine._engine._died("of old age", None)
        return super().__call__(table)


@pytest.mark.ray
@pytest.mark.exhaustive
def test_an_actor_of_a_dead_engine_starts_anew(local_ray: Any, config: EngineConfig, tmp_path: Path) -> None:
    arguments = {"marker": str(tmp_path / "died"), "config": config}
    rows = [{"query": "a", "document": f"b {i}"} for i in range(20)]
    given = local_ray.data.from_items(rows, override_num_blocks=4)
    scored = ActorPool(1, 1, 0).map_batches(given, DyingRows, arguments, None).take_all()
    assert (tmp_path / "died").exists()
    assert sorted(row["document"] for row in scored) == sorted(row["document"] for row in rows)
    assert all(row["error"] is None for row in scored)


def test_a_document_that_cannot_be_scored_spares_the_others(late: ScoreRows) -> None:
    table = _table(
        {"id": 1, "query": "file", "documents": ["a file", None, "a list"]},
        {"id": 2, "query": None, "documents": ["a file", "a list"]},
        {"id": 3, "query": "file", "documents": []},
        {"id": 4, "query": "file", "documents": None},
        {"id": 5, "query": "file", "documents": ["a file"]},
    )
    rows = late(table).to_pylist()
    first, *_, last = rows
    assert [row["id"] for row in rows] == [1, 2, 3, 4, 5]
    assert first["scores"][0] == pytest.approx(last["scores"][0], rel=1e-6)
    assert (first["scores"][1], first["error"]) == (None, "documents[1]: is no text but null")
    assert isinstance(first["scores"][2], float)
    assert (rows[1]["scores"], rows[1]["error"]) == ([None, None], "query is no text but null")
    assert (rows[2]["scores"], rows[2]["error"]) == ([], None)
    assert (rows[3]["scores"], rows[3]["error"]) == (None, "there are no documents")
    (row,) = late.score(broken := [{"query": "file", "documents": [None, "a file", "\ud800"]}])
    assert row["error"].startswith("documents[0]: is no text but null; documents[2]: has half of a ")
    with patch.object(late._engine._engine, "score", side_effect=InvalidRequestError("documents[1] is bad")):
        assert late.score(broken)[0]["error"] == "documents[2] is bad"


def test_a_document_that_is_too_long_is_named(bert_cross_encoder: str) -> None:
    texts = ["a file", "word " * 50]
    config = EngineConfig(model=bert_cross_encoder, dtype="float32", max_model_len=16)
    short = ScoreRows(config, truncation="error")
    row = short(_table({"query": "file", "documents": texts})).to_pylist()[0]
    pairs = short(_table(*({"query": "file", "document": text} for text in texts)))
    short.close()
    assert [score is None for score in row["scores"]] == [False, True]
    assert row["error"].startswith("documents[1]: has ")
    assert [score is None for score in pairs["score"].to_pylist()] == [False, True]
    assert [error and error[:13] for error in pairs["error"].to_pylist()] == [None, "document has "]


def test_other_columns_stay_and_added_ones_are_replaced(late: ScoreRows) -> None:
    table = _table({"score": "old", "query": "file", "document": "a file", "n": 1, "error": "old"})
    scored = late(table)
    assert scored.column_names == ["query", "document", "n", "score", "error", "prompt_tokens"]
    assert (scored["n"].to_pylist(), scored["error"].to_pylist()) == ([1], [None])


def test_what_does_not_fit_is_refused_before_any_row(late: ScoreRows, bert_cross_encoder: str) -> None:
    with pytest.raises(TypeError, match='batch_format="pyarrow"'):
        late({"query": np.array(["a"])})
    with pytest.raises(ValueError, match="no column query, but document"):
        late(_table({"document": "a"}))
    with pytest.raises(ValueError, match="neither documents nor document, but query"):
        late(_table({"query": "a"}))
    with pytest.raises(TypeError, match="no option timeout"):
        build_scorer(EngineConfig(), timeout=1)
    with pytest.raises(InvalidRequestError, match="instruction"):
        ScoreRows(EngineConfig(model=bert_cross_encoder), instruction="be kind")
    with pytest.raises(ValueError, match="threads=2, but num_cpus=1"):
        build_scorer(EngineConfig(threads=2), num_cpus=1)


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_texts_have_the_engines_embeddings(task: Any, config: EngineConfig, qwen3_embedding: str) -> None:
    if task == "embed":
        config = EngineConfig(model=qwen3_embedding, dtype="float32")
    rows = EmbedRows(config, task, input_type="document")
    embedded = rows(_table(*({"id": i, "text": text} for i, text in enumerate([*DOCUMENTS, None]))))
    rows.close()
    with SyncEngine(config, progress=False) as engine:
        method = engine.embed if task == "embed" else engine.embed_tokens
        expected = method(DOCUMENTS, input_type="document").embeddings
    *found, last = embedded.to_pylist()
    for row, vectors in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(row["embedding"], dtype=np.float32), vectors, atol=1e-6)
        assert row["prompt_tokens"] > 2
    assert (last["embedding"], last["error"]) == (None, "text is no text but NoneType")


def test_a_dead_engine_is_an_error_outside_of_an_actor(config: EngineConfig) -> None:
    rows = ScoreRows(config)
    rows._engine._engine._died("of old age", None)
    with pytest.raises(EngineDeadError, match="of old age"):
        rows(_table({"query": "a", "document": "b"}))
    rows.close()


@pytest.mark.ray
@pytest.mark.exhaustive
def test_every_row_is_there_once_after_kills(tmp_path: Path) -> None:
    rows = soak.pairs(2000)
    parquet.write_table(rows, tmp_path / "in.parquet", row_group_size=333)
    killed = soak.score_with_kills(tmp_path / "in.parquet", tmp_path / "out", 50, soak.KILLS[:2])
    assert [what for what, _ in killed] == ["actor", "command"]
    assert 400 <= killed[0][1] <= killed[1][1] < 2000
    verdict = soak.compare(rows, tmp_path / "out", soak.direct_scores(rows))
    assert verdict == soak.Verdict(missing=0, doubled=0, wrong=0, is_in_order=True)


@pytest.mark.ray
@pytest.mark.exhaustive
def test_lines_of_json_have_their_scores_and_errors(tmp_path: Path) -> None:
    lines = [json.dumps({"id": i, "documents": DOCUMENTS, "nested": {"a": [i]}}) for i in range(5)]
    lines += ["{broken", "[1]", '{"document": 7}']
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.jsonl").write_text("\n\n".join(lines) + "\n")
    (tmp_path / "in" / "a.jsonl").write_text('{"id": "first", "document": "\\ud800"}')
    command = ["cluster", "score", str(tmp_path / "in"), str(tmp_path / "out"), "--query", QUERIES[0]]
    command += ["--batch-size", "3", "--dtype", "float32"]
    ran = subprocess.run([installed_command(), *command], capture_output=True, text=True, timeout=600)
    assert "9 of 9 rows" in ran.stderr
    assert ran.returncode == 0
    with SyncEngine(EngineConfig(dtype="float32"), progress=False) as engine:
        expected = engine.score(QUERIES[0], DOCUMENTS).scores
    files = sorted((tmp_path / "out").glob("*.jsonl"))
    assert [len(file.read_text().splitlines()) for file in files] == [1, 3, 3, 2]
    first, *rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert first["id"] == "first"
    for i, row in enumerate(rows[:5]):
        assert (row["id"], row["nested"], row["error"]) == (i, {"a": [i]}, None)
        assert row["scores"] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    errors = ["is no JSON", "is no JSON object but list", "document is no text but int"]
    assert [row["error"].split(":")[0] for row in rows[5:]] == errors
    # All of it is there: this needs no model.
    for more, status, answer in (
        ([], 1, "go on with --resume"),
        (["--resume"], 0, "9 of 9 rows"),
        (["--resume", "--normalize"], 1, "belongs to another run"),
    ):
        again = CliRunner().invoke(main, [*command, *more])
        assert again.exit_code == status
        assert answer in again.output


@pytest.mark.ray
@pytest.mark.exhaustive
def test_a_model_that_is_not_there_is_one_line(local_ray: None, tmp_path: Path) -> None:
    parquet.write_table(soak.pairs(3), tmp_path / "in.parquet")
    missing = EngineConfig(model=str(tmp_path / "none"))
    work = Work(missing, Files.of(tmp_path / "in.parquet"), None, {}, 10)
    with pytest.raises(ScoringError, match=r"^there is no folder '\S+none'$"):
        next(score_shards(work, work.shards(), ActorPool(1, 1, 0), tmp_path))


def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{}")
    code = "import sys; sys.modules['ray'] = None; from maxsimd.api.cli import main; main()"
    words = ["cluster", "score", str(tmp_path / "in.jsonl"), str(tmp_path / "out")]
    ran = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=os.environ
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("Error: this needs Ray: pip install '.[ray]'")
    assert not (tmp_path / "out").exists()
