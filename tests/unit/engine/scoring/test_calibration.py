"""Scores as probabilities: beside scikit-learn, over the command line, and refused for another model."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sklearn.isotonic import IsotonicRegression
from transformers import PretrainedConfig

from maxsimd.api.cli import main
from maxsimd.api.cli.evaluate import Judged, read_grades, read_texts
from maxsimd.bench.datasets import Pair
from maxsimd.engine import Engine, EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint.model import PairRules, Task
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.device.stores import model_digest
from maxsimd.engine.scoring.scale import Calibration
from tests.unit.calling_handlers import Caller, RecordingEngine
from tests.unit.engine.processors.small_models import model


def test_it_is_scikit_learns_isotonic_regression(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    drawn = draw.random(500)
    scores, relevant = drawn.tolist(), (draw.random(500) < drawn**2).tolist()
    calibration = Calibration.fitted("m", scores, relevant)
    expected = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(scores, relevant)
    asked = np.linspace(-0.5, 1.5, 1001, dtype=np.float32)
    np.testing.assert_allclose(calibration(asked), expected.predict(asked), atol=1e-6)
    assert np.isnan(calibration(np.array([np.nan], dtype=np.float32))).all()
    for alike in ([True, True], [False, False]):
        with pytest.raises(ValueError, match="judged alike"):
            Calibration.fitted("m", [0.1, 0.2], alike)
    calibration.write(tmp_path / "c.json")
    again = Calibration.read(tmp_path / "c.json")
    assert (again.model, again.judged) == ("m", 500)
    np.testing.assert_array_equal(again(asked), calibration(asked))


def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    Calibration("m", np.array([0.1, 0.9]), np.array([0.2, 0.8]), 2).write(path)
    written = json.loads(path.read_text())
    changes: tuple[dict[str, Any], ...] = (
        *({"format": "other"}, {"judged": None}, {"scores": [0.1]}, {"scores": "a"}, {"scores": [0.9, 0.1]}),
        {"scores": [], "probabilities": []},
        *({"probabilities": wrong} for wrong in ([0.9, 0.1], [0.1, 1.1], [0.1, float("nan")])),
    )
    for change in changes:
        path.write_text(json.dumps(written | change))
        with pytest.raises(ValueError, match="it"):
            Calibration.read(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, pairs: list[Pair]) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    queries = [{"_id": f"q{i}", "text": pair.query} for i, pair in enumerate(pairs[:12])]
    corpus = [{"_id": f"d{i}", "title": "", "text": pair.document[:80]} for i, pair in enumerate(pairs[:12])]
    for name, records in (("queries.jsonl", queries), ("corpus.jsonl", corpus)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(12))
    (folder / "qrels.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}", "utf-8")
    return folder


def _calibrate(files: Path, out: Path, *more: str, qrels: Path | None = None) -> Any:
    texts = ["--queries", str(files / "queries.jsonl"), "--documents", str(files / "corpus.jsonl")]
    judged = ["--qrels", str(qrels or files / "qrels.tsv")]
    return CliRunner().invoke(main, ["calibrate", *texts, *judged, "--out", str(out), *more])


def test_a_calibrated_server_gives_probabilities(files: Path, tmp_path: Path, stanford_colbert: str) -> None:
    out = tmp_path / "calibration.json"
    bad = tmp_path / "bad.tsv"
    bad.write_text("other d0 1\n")
    ran = _calibrate(files, tmp_path / "out.json", stanford_colbert, qrels=bad)
    assert (ran.exit_code, "no judgment names" in ran.output) == (1, True), ran.output
    named = {"documents": "corpus.jsonl", "queries": "queries.jsonl", "qrels": "qrels.tsv"}
    values = {"data": None, **{option: str(files / name) for option, name in named.items()}}
    assert len({id(ids) for _, ids in Judged.of(values).work}) == 1, "all queries share one list"
    ran = _calibrate(files, out, stanford_colbert, "--dtype", "float32", "--others", "5")
    assert ran.exit_code == 0, ran.output
    assert "12 queries" in ran.output
    assert f"--model-option calibration={out}" in ran.output

    async def check() -> None:
        query, document = "open a file", "Open a file and return a stream."
        calibration = Calibration.read(out)
        config = EngineConfig(model=stanford_colbert, dtype="float32", calibration=str(out))
        async with RecordingEngine(config) as engine, Engine(replace(config, calibration=None)) as plain:
            normalized = await plain.score(query, [document, "x"], normalize=True)
            found = await engine.score(query, [document, "x"], normalize=True)
            expected = calibration(np.array(normalized.scores, dtype=np.float32))
            np.testing.assert_allclose(found.scores, expected, rtol=1e-6)
            assert (await engine.score(query, document)).scores == (await plain.score(query, document)).scores
            body = {"query": query, "documents": [document], "normalize": True}
            answer = await Caller(engine).json("/rerank", body)
            assert answer["score_scale"]["transform"] == "calibrated probability"
        for other, reason in (
            (replace(config, query_prompt="query: "), "is of another model"),
            (replace(config, calibration=str(tmp_path / "none")), "cannot be read"),
        ):
            with pytest.raises(ModelLoadError, match=reason):
                await Engine(other).start()

    asyncio.run(check())


_TEMPLATE = ScoreTemplate(("{{ query }} {{ document }}",))


def _joined(**changes: Any) -> dict[str, Any]:
    return {"pairs": PairRules(template=replace(_TEMPLATE, **changes))}


def test_a_calibration_is_of_all_that_changes_scores() -> None:
    backbone: Any = torch.nn.Identity()
    backbone.config = PretrainedConfig()
    task = Task("cls", torch.nn.Linear(2, 1), 1, False)
    given = model(backbone=backbone, tasks={"classify": task}, score_task="classify", **_joined())
    digest = model_digest(given, EngineConfig(model="m"))
    # Precision, threads and the like change scores by rounding only.
    alike = EngineConfig(model="m", dtype="bfloat16", kernels="torch", threads=1)
    assert model_digest(replace(given), alike) == digest
    for change in (
        {"tasks": {"classify": replace(task, dim=2)}}, {"score_label": 1},
        {"probabilities": torch.nn.Softmax(dim=-1)}, {"truncation_side": "left"}, {"uncounted_id": 1},
        {"ending_pad_id": 1}, _joined(instruction="find it"), _joined(variables={"a": 1}),
        _joined(restores_end=False), _joined(trailing_ids=(1,)),
        {"pairs": PairRules("only_second", _TEMPLATE)},
    ):  # fmt: skip
        assert model_digest(replace(given, **change), EngineConfig(model="m")) != digest, change


def test_judgments_come_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "qrels"
    path.write_text("query\tdocument\tscore\n1 0 a 2\n1 0 b 0\n2 c -1\n\n2\td e\t1.0\n2\t0\tf\t0\n")
    assert read_grades(str(path)) == {"1": {"a": 2, "b": 0}, "2": {"c": -1, "d e": 1, "f": 0}}
    path.write_text('{"_id": 1, "text": "b", "title": "a"}\n{"_id": "2", "text": "c", "title": null}\n')
    assert read_texts(str(path)) == {"1": "a b", "2": "c"}
    wrong: Any = dict.fromkeys(("q d high", "q d 0.5", "q d nan", "d 1", "q a b c 1"), read_grades)
    wrong |= dict.fromkeys(('{"_id": 1}', '{"_id": 1, "text": null}', "[" * 100_000), read_texts)
    for line, read in wrong.items():
        path.write_text(f'{{"_id": 1, "text": "a"}}\n{line}')
        with pytest.raises(ValueError, match="line 2"):
            read(str(path))
