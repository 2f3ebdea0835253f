"""The commands that work on files, as people run them: in a terminal, in a pipe, interrupted and resumed."""

import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pytest
from click.testing import CliRunner

from maxsimd.api.cli import main
from maxsimd.bench.datasets import docstring_pairs, numbered_documents
from maxsimd.engine import EngineConfig, SyncEngine
from tests.forked import Program, run_command
from tests.server.conftest import installed_command
from tests.waiting import wait_for

QUERY = "how is a file opened"
TEXTS = [
    "Open a file and return a stream.",
    "Sort a list in place.",
    "Käse, 東京 and 🎉.",
    "Read lines from a file.",
]
FLOAT32 = ("--dtype", "float32")


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


def test_a_pipe_and_a_field_and_scores_in_order(scores: list[float]) -> None:
    body = "".join(json.dumps({"a": text[:5], "b": text[5:].strip()}) + "\n" for text in TEXTS[:2])
    options = ("--query", QUERY, "--documents", "-", *FLOAT32)
    ran = run_command("score", *options, "--field", "b", stdin=body.encode())
    assert [each["index"] for each in _lines(ran.stdout)] == [0, 1]
    assert [each["text"] for each in _lines(ran.stdout)] == [text[5:].strip() for text in TEXTS[:2]]
    ran = run_command("score", *options, "--normalize", stdin="\n".join(TEXTS).encode())
    assert all(0 <= each["score"] <= 1 for each in _lines(ran.stdout))


def test_a_terminal_shows_a_table_and_one_line_of_progress(tmp_path: Path) -> None:
    file = tmp_path / "documents.txt"
    file.write_text("\n".join([*TEXTS, "x" * 500]), encoding="utf-8")
    shown, end = pty.openpty()
    os.environ["COLUMNS"] = "80"
    process = subprocess.Popen(
        [installed_command(), "rerank", "--query", QUERY, "--documents", str(file), *FLOAT32],
        stdin=end,
        stdout=end,
        stderr=end,
        env={**os.environ, "COLUMNS": "80"},
    )
    os.close(end)
    output = b""
    while True:
        try:
            part = os.read(shown, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    assert process.wait(timeout=60) == 0
    text = output.decode()
    assert "\r" in text
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n") if line]
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("rank")) :]
    assert len(table) == 6
    assert re.fullmatch(r" +1 +\d+\.\d{4}  0 +Open a file and return a stream\.", table[1])
    assert all(len(line) <= 80 for line in table)
    assert "..." in text


def test_a_run_that_was_interrupted_goes_on_as_if_it_were_one(tmp_path: Path) -> None:
    file, out, whole = (tmp_path / name for name in ("documents.txt", "out.jsonl", "whole.jsonl"))
    texts = [" ".join(text.split())[:80] for text in numbered_documents(900)]
    file.write_text("\n".join(texts), encoding="utf-8")
    options = ["rerank", "--query", QUERY, "--documents", str(file), *FLOAT32]
    run_command(*options, "--out", str(whole))
    journal = Path(f"{out}.part")
    said = tmp_path / "said"
    process = Program([*options, "--out", str(out)]).start(said)
    wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 256, 120)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "--resume goes on" in said.read_text()
    assert not out.exists()
    done = journal.read_bytes().count(b"\n") - 1
    assert 0 < done < 900

    again = run_command(*options, "--out", str(out), status=1)
    assert "go on with --resume, or remove it" in again.stderr
    other = run_command(*options[:2], "another query", *options[3:], "--out", str(out), "--resume", status=1)
    assert "is of another run" in other.stderr

    with journal.open("ab") as half:
        half.write(b"[7, 0.")  # as if the process had ended while it wrote
    resumed = run_command(*options, "--out", str(out), "--resume")
    assert f"{done:,} of 900 documents" in resumed.stderr
    assert not journal.exists()
    ours, expected = _lines(out.read_text("utf-8")), _lines(whole.read_text("utf-8"))
    # Documents of nearly the same score may change places: steps are filled otherwise the second time.
    scores = {each["index"]: each["score"] for each in expected}
    assert {each["index"]: each["score"] for each in ours} == pytest.approx(scores, rel=1e-6)
    assert [each["score"] for each in ours] == sorted((each["score"] for each in ours), reverse=True)
    assert len(ours) == 900


def test_ctrl_c_without_a_file_prints_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "documents.txt"
    file.write_text(
        "\n".join(" ".join(text.split())[:80] for text in numbered_documents(2500)), encoding="utf-8"
    )
    command = [installed_command(), "score", "--query", QUERY, "--documents", str(file), *FLOAT32]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if re.match(rb"[1-9][\d,]* of 2,500", line):
            break
    process.send_signal(signal.SIGINT)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"documents left" in said
    found = _lines(output.decode())
    assert 0 < len(found) < 2500
    assert [each["index"] for each in found] == sorted(each["index"] for each in found)


def test_a_document_that_cannot_be_read_spares_the_others(tmp_path: Path) -> None:
    file = tmp_path / "documents.txt"
    texts = ["short", "word " * 1000, "last", "bad \ud83d"]
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    options = ("--query", QUERY, "--documents", str(file), "--input-format", "jsonl", *FLOAT32)
    ran = run_command("score", *options, "--long-documents", "error")
    lines = _lines(ran.stdout)
    assert ["error" in each for each in lines] == [False, True, False, True]
    assert "document 1 has no score" in ran.stderr


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
    file, out = tmp_path / "texts.jsonl", tmp_path / "vectors.npy"
    file.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)), "utf-8")
    with SyncEngine(EngineConfig(dtype="float32"), progress=False) as engine:
        one = engine.embed(TEXTS, input_type="document").embeddings
        each = engine.embed_tokens(TEXTS).embeddings
    options = ("--texts", str(file), *FLOAT32)
    run_command("embed", *options, "--input-type", "document", "--out", str(out))
    np.testing.assert_allclose(np.load(out), one, atol=1e-6)
    tokens = tmp_path / "tokens.npz"
    run_command("embed", *options, "--tokens", "--out", str(tokens))
    with np.load(tokens) as found:
        assert found["offsets"].tolist() == [0, *np.cumsum([len(rows) for rows in each])]
        np.testing.assert_allclose(found["embeddings"], np.concatenate(each), atol=1e-6)
    lines = _lines(run_command("embed", *options).stdout)
    assert [line["id"] for line in lines] == ["0", "1", "2", "3"]
    np.testing.assert_allclose([line["embedding"] for line in lines], one, atol=1e-6)
    assert "--out must end in .npy" in run_command("embed", *options, "--out", str(tokens), status=2).stderr


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 queries over 60 documents in BEIR's files; grades 0 to 2."""
    folder = tmp_path_factory.mktemp("judged")
    pairs = docstring_pairs()[:60]
    documents = [{"_id": f"d{i}", "title": "", "text": pair.document} for i, pair in enumerate(pairs)]
    queries = [{"_id": f"q{i}", "text": pair.query} for i, pair in enumerate(pairs[:40])]
    rows = [f"q{i}\td{(i + step) % 60}\t{2 - step}" for i in range(40) for step in range(3)]
    for name, records in (("documents", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    (folder / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]), encoding="utf-8")
    return folder


def _eval(judged: Path, *more: str) -> subprocess.CompletedProcess[str]:
    files = [
        (f"--{name}", str(judged / file))
        for name, file in (
            ("queries", "queries.jsonl"),
            ("documents", "documents.jsonl"),
            ("qrels", "qrels.tsv"),
        )
    ]
    return run_command("eval", *FLOAT32, *(part for pair in files for part in pair), *more)


def test_eval_measures_what_ir_measures_does(judged: Path, tmp_path: Path) -> None:
    pairs = docstring_pairs()[:60]
    with SyncEngine(EngineConfig(dtype="float32"), progress=False) as engine:
        by_hand = {
            f"q{i}": {
                f"d{j}": score
                for j, score in enumerate(engine.score(pair.query, [each.document for each in pairs]).scores)
            }
            for i, pair in enumerate(pairs[:40])
        }
    qrels = {f"q{i}": {f"d{(i + step) % 60}": 2 - step for step in range(3)} for i in range(40)}
    measures = [ir_measures.nDCG @ 10, ir_measures.RR, ir_measures.R @ 100]
    expected = {
        str(name): value for name, value in ir_measures.calc_aggregate(measures, qrels, by_hand).items()
    }
    run_file = tmp_path / "run.txt"
    found = json.loads(_eval(judged, "--json", "--run", str(run_file)).stdout)
    assert found == pytest.approx(expected, abs=1e-9)
    assert 0 < found["nDCG@10"] < 1
    again = ir_measures.calc_aggregate(measures, qrels, ir_measures.read_trec_run(str(run_file)))
    assert {str(name): value for name, value in again.items()} == pytest.approx(expected, abs=1e-9)
    shown = _eval(judged).stdout
    assert f"nDCG@10    {expected['nDCG@10']:.4f}" in shown

    # Of the best ten alone, in TREC's files.
    few = _eval(judged, "--candidates", str(run_file), "--depth", "10", "--json", "--measure", "nDCG@10")
    assert json.loads(few.stdout) == pytest.approx({"nDCG@10": expected["nDCG@10"]}, abs=1e-9)


def test_eval_says_what_is_wrong_with_its_files(judged: Path, tmp_path: Path) -> None:
    other = tmp_path / "qrels.txt"
    other.write_text("x 0 y 1\n", encoding="utf-8")
    words = ["eval", "--queries", str(judged / "queries.jsonl")]
    words += ["--documents", str(judged / "documents.jsonl"), "--qrels", str(other)]
    ran = CliRunner().invoke(main, words)
    assert ran.exit_code == 1
    assert "compare their ids" in ran.stderr
    ran = CliRunner().invoke(main, [*words, "--measure", "nope"])
    assert ran.exit_code == 2
    assert "ir_measures knows no such measure" in ran.stderr
