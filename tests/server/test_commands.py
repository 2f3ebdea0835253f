"""The commands that work on files, as people run them: in a terminal, in a pipe, interrupted and resumed."""

import json
import os
import pty
import re
import signal
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pytest
from click.testing import CliRunner, Result

from maxsimd.api.cli import main
from maxsimd.bench.datasets import docstring_pairs
from maxsimd.engine import EngineConfig, SyncEngine
from tests.forked import Program, run_command
from tests.waiting import wait_for

QUERY = "how is a file opened"
TEXTS = [
    "Open a file and return a stream.",
    "Sort a list in place.",
    "Käse, 東京 and 🎉.",
    "Read lines from a file.",
]
FLOAT32 = ("--dtype", "float32")
PAIRS = docstring_pairs()[:20]


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def scores() -> list[float]:
    with SyncEngine(EngineConfig(dtype="float32"), progress=False) as engine:
        return engine.score(QUERY, TEXTS).scores


def test_the_best_documents_of_a_file(tmp_path: Path, scores: list[float]) -> None:
    file = tmp_path / "documents.jsonl"
    records = [{"_id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    ran = run_command("rerank", "--query", QUERY, "--documents", str(file), *FLOAT32, "--top-n", "3")
    found = _lines(ran.stdout)
    best = sorted(range(len(TEXTS)), key=lambda i: -scores[i])[:3]
    assert [each["index"] for each in found] == best
    assert [each["score"] for each in found] == pytest.approx([scores[i] for i in best], rel=1e-6, abs=1e-5)
    assert [each["text"] for each in found] == [TEXTS[i] for i in best]
    assert [each["id"] for each in found] == [f"d{i}" for i in best]
    assert "4 of 4 documents" in ran.stderr


def test_a_pipe_gives_scores_in_order_and_errors_among_them() -> None:
    texts = [*TEXTS, "word " * 1000, "it is bad \ud83d"]
    body = "".join(json.dumps({"a": text[:5], "b": text[5:]}) + "\n" for text in texts)
    options = ("--query", QUERY, "--documents", "-", *FLOAT32, "--field", "b", "--normalize")
    ran = run_command("score", *options, "--long-documents", "error", stdin=body.encode())
    lines = _lines(ran.stdout)
    assert [each["index"] for each in lines] == [*range(6)]
    assert [each["text"] for each in lines[:4]] == [text[5:] for text in TEXTS]
    assert all(0 <= each["score"] <= 1 for each in lines[:4])
    assert ["error" in each for each in lines] == [False] * 4 + [True] * 2
    assert "document 4 has no score" in ran.stderr


def test_a_terminal_shows_a_table_and_one_line_of_progress(tmp_path: Path) -> None:
    file = tmp_path / "documents.txt"
    file.write_text("\n".join([*TEXTS, "x" * 500]), encoding="utf-8")
    shown, end = pty.openpty()
    terminal = Path(os.ttyname(end))
    words = ["rerank", "--query", QUERY, "--documents", str(file), *FLOAT32]
    process = Program(words, environment={"COLUMNS": "80"}).start(terminal, given=terminal)
    assert process.wait(timeout=60) == 0, os.read(shown, 1 << 16).decode()
    text = os.read(shown, 1 << 16).decode()  # as much as a terminal holds
    os.close(end)
    os.close(shown)
    assert "\r" in text
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n") if line]
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("rank")) :]
    assert len(table) == 6
    assert re.fullmatch(r" +1 +\d+\.\d{4}  0 +Open a file and return a stream\.", table[1])
    assert all(len(line) <= 80 for line in table)
    assert "..." in text


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_as_if_it_were_one(tmp_path: Path) -> None:
    file, out = tmp_path / "documents.txt", tmp_path / "out.jsonl"
    texts = [f"{i} {TEXTS[i % 4]}" for i in range(1300)]  # a part has 256, and four are asked for at a time
    file.write_text("\n".join(texts), encoding="utf-8")
    options = ["rerank", "--query", QUERY, "--documents", str(file), *FLOAT32, "--threads", "1"]
    journal, said = Path(f"{out}.part"), tmp_path / "said"
    process = Program([*options, "--out", str(out)]).start(said)
    wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 256, 120)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "--resume goes on" in said.read_text()
    assert not out.exists()
    done = journal.read_bytes().count(b"\n") - 1
    assert 0 < done < len(texts)

    again = CliRunner().invoke(main, [*options, "--out", str(out)])
    assert (again.exit_code, "go on with --resume, or remove it" in again.stderr) == (1, True)

    with journal.open("ab") as half:
        half.write(b"[7, 0.")  # as if the process had ended while it wrote
    resumed = run_command(*options, "--out", str(out), "--resume")
    assert f"{done:,} of {len(texts):,} documents" in resumed.stderr
    assert not journal.exists()
    found = _lines(out.read_text("utf-8"))
    assert sorted(each["index"] for each in found) == [*range(len(texts))]
    scores = [each["score"] for each in found]
    assert scores == sorted(scores, reverse=True)
    some = {each["index"]: each["score"] for each in found if each["index"] % 64 == 0}
    with SyncEngine(EngineConfig(dtype="float32"), progress=False) as engine:
        expected = engine.score(QUERY, [texts[i] for i in some]).scores
    assert [*some.values()] == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_ctrl_c_without_a_file_prints_what_there_is(tmp_path: Path) -> None:
    file, out, said = (tmp_path / name for name in ("documents.txt", "out", "said"))
    file.write_text("\n".join(f"{i} {TEXTS[i % 4]}" for i in range(2500)), encoding="utf-8")
    command = ["score", "--query", QUERY, "--documents", str(file), *FLOAT32, "--threads", "1"]
    process = Program(command).start(out, said)
    wait_for(
        lambda: said.exists() and re.search(r"\b[1-9][\d,]* of 2,500", said.read_text()) is not None, 120
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "documents left" in said.read_text()
    found = _lines(out.read_text())
    assert 0 < len(found) < 2500
    assert [each["index"] for each in found] == sorted(each["index"] for each in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rerank", "--query", "q", "--documents", "/nowhere"], "does not exist"),
        (["rerank", "--query", "q", "--documents", "{file}", "--field", "x"], "line 1"),
        (["rerank", "--query", "q", "--documents", "{file}", "--resume"], "--resume needs --out"),
        (["rerank", "/no/model", "--query", "q", "--documents", "{file}"], "there is no folder"),
        (["rerank", "--query", "q", "--documents", "{file}", "--device", "cuda"], "CUDA"),
        (["score", "--query", "q", "--documents", "{empty}"], "there is no text in"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    file, empty = tmp_path / "a.jsonl", tmp_path / "empty.txt"
    file.write_text('{"text": "a"}\n', encoding="utf-8")
    empty.write_text("\n", encoding="utf-8")
    ran = CliRunner().invoke(main, [each.format(file=file, empty=empty) for each in arguments])
    assert ran.exit_code in (1, 2)
    assert message in ran.stderr
    assert isinstance(ran.exception, SystemExit), "there is no traceback"
    assert len([line for line in ran.stderr.splitlines() if line.startswith("Error")]) == 1


def test_texts_are_embedded(tmp_path: Path) -> None:
    file, out, tokens = (tmp_path / name for name in ("texts.jsonl", "vectors.npy", "tokens.npz"))
    file.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)), "utf-8")
    with SyncEngine(EngineConfig(dtype="float32"), progress=False) as engine:
        one = engine.embed(TEXTS, input_type="document").embeddings
        each = engine.embed_tokens(TEXTS).embeddings

    def embed(*options: str, status: int = 0) -> Result:
        ran = CliRunner().invoke(main, ["embed", "--texts", str(file), *FLOAT32, *options])
        assert ran.exit_code == status, ran.output
        return ran

    embed("--input-type", "document", "--out", str(out))
    np.testing.assert_allclose(np.load(out), one, atol=1e-6)
    embed("--tokens", "--out", str(tokens))
    with np.load(tokens) as found:
        assert found["offsets"].tolist() == [0, *np.cumsum([len(rows) for rows in each])]
        np.testing.assert_allclose(found["embeddings"], np.concatenate(each), atol=1e-6)
    lines = _lines(embed().stdout)
    assert [line["id"] for line in lines] == ["0", "1", "2", "3"]
    np.testing.assert_allclose([line["embedding"] for line in lines], one, atol=1e-6)
    assert "--out must end in .npy" in embed("--out", str(tokens), status=2).stderr


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 queries over 20 documents in BEIR's files; grades 0 to 2."""
    folder = tmp_path_factory.mktemp("judged")
    documents = [{"_id": f"d{i}", "title": "", "text": pair.document[:200]} for i, pair in enumerate(PAIRS)]
    queries = [{"_id": f"q{i}", "text": pair.query} for i, pair in enumerate(PAIRS[:12])]
    rows = [f"q{i}\td{(i + step) % 20}\t{2 - step}" for i in range(12) for step in range(3)]
    for name, records in (("documents", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    (folder / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]), encoding="utf-8")
    return folder


def _eval(folder: Path, *more: str, qrels: str = "qrels.tsv") -> Result:
    files = {"queries": "queries.jsonl", "documents": "documents.jsonl", "qrels": qrels}
    options = [part for name, file in files.items() for part in (f"--{name}", str(folder / file))]
    return CliRunner().invoke(main, ["eval", *FLOAT32, *options, *more])


def test_eval_measures_what_ir_measures_does(judged: Path, tmp_path: Path) -> None:
    documents = [pair.document[:200] for pair in PAIRS]
    with SyncEngine(EngineConfig(dtype="float32"), progress=False) as engine:
        by_hand = {
            f"q{i}": {f"d{j}": score for j, score in enumerate(engine.score(pair.query, documents).scores)}
            for i, pair in enumerate(PAIRS[:12])
        }
    qrels = {f"q{i}": {f"d{(i + step) % 20}": 2 - step for step in range(3)} for i in range(12)}
    measures = [ir_measures.nDCG @ 10, ir_measures.RR, ir_measures.R @ 100]
    calculated = ir_measures.calc_aggregate(measures, qrels, by_hand)
    expected = {str(name): value for name, value in calculated.items()}
    run_file = tmp_path / "run.txt"
    assert f"nDCG@10    {expected['nDCG@10']:.4f}" in _eval(judged, "--run", str(run_file)).stdout
    assert 0 < expected["nDCG@10"] < 1
    again = ir_measures.calc_aggregate(measures, qrels, ir_measures.read_trec_run(str(run_file)))
    assert {str(name): value for name, value in again.items()} == pytest.approx(expected, abs=1e-9)

    # Of the best ten alone, in TREC's files.
    few = _eval(judged, "--candidates", str(run_file), "--depth", "10", "--json", "--measure", "nDCG@10")
    assert json.loads(few.stdout) == pytest.approx({"nDCG@10": expected["nDCG@10"]}, abs=1e-9)


def test_eval_says_what_is_wrong_with_its_files(judged: Path) -> None:
    (judged / "other.txt").write_text("x 0 y 1\n", encoding="utf-8")
    ran = _eval(judged, qrels="other.txt")
    assert (ran.exit_code, "compare their ids" in ran.stderr) == (1, True)
    ran = _eval(judged, "--measure", "nope", qrels="other.txt")
    assert (ran.exit_code, "ir_measures knows no such measure" in ran.stderr) == (2, True)
