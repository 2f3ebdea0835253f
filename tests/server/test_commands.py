"""The commands that work on files, as people run them: in a terminal, in a pipe, interrupted and resumed."""

import csv
import json
import os
import pty
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from maxsimd.api.cli import main
from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig, SyncEngine
from maxsimd.engine.media import PictureError, PictureLimits, pages_of
from tests.checkpoints import visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.forked import Program, run_command
from tests.waiting import wait_for

QUERY = "how is a file opened"
TEXTS = [
    "Open a file and return a stream.", "Sort a list in place.", "Käse, 東京 and 🎉.",
    "Read lines from a file.",
]  # fmt: skip
FLOAT32 = ("--dtype", "float32")


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def _engine(model: str | None = None) -> SyncEngine:
    return SyncEngine(EngineConfig(model=model, dtype="float32"), progress=False)


@pytest.fixture(scope="module")
def small_engine(bge: str) -> Iterator[SyncEngine]:
    with _engine(bge) as engine:
        yield engine


def test_the_best_documents_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "documents.jsonl"
    rows = [{"_id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    ran = run_command("rerank", "--query", QUERY, f"--documents={file}", *FLOAT32, "--top-n=3", "--explain")
    with _engine() as engine:
        best = engine.rerank(QUERY, TEXTS, top_n=3, explain=True).results
    for line, result in zip(_lines(ran.stdout), best, strict=True):
        assert line.pop("score") == pytest.approx(result.score, rel=1e-6, abs=1e-5)
        asked = [each.query_token for each in result.explanation.matches if each.query_span]
        assert [each[0] for each in line.pop("matches")] == asked
        assert line == {"index": result.index, "text": TEXTS[result.index], "id": f"d{result.index}"}
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
    assert process.wait(timeout=600) == 0, os.read(shown, 1 << 16).decode()
    text = os.read(shown, 1 << 16).decode()  # as much as a terminal holds
    os.close(end)
    os.close(shown)
    assert "\r" in text
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n") if line]
    table = lines[-6:]
    assert table[0].startswith("rank")
    assert re.fullmatch(r" +1 +\d+\.\d{4}  0 +Open a file and return a stream\.", table[1])
    assert all(len(line) <= 80 for line in table)
    assert "..." in text


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_as_if_it_were_one(tmp_path: Path) -> None:
    file, out = tmp_path / "documents.txt", tmp_path / "out.jsonl"
    texts = [f"{i} {TEXTS[i % 4]}" for i in range(1300)]  # a part has 256, and four are asked for at a time
    file.write_text("\n".join(texts), encoding="utf-8")
    files = ["--documents", str(file), "--out", str(out)]
    options = ["rerank", "--query", QUERY, *files, *FLOAT32, "--threads", "1"]
    journal, said = Path(f"{out}.part"), tmp_path / "said"
    process = Program(options).start(said)
    wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 256)
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == 130
    assert "continue with --resume" in said.read_text()
    assert not out.exists()
    done = journal.read_bytes().count(b"\n") - 1
    assert 0 < done < len(texts)

    assert f"{done:,} of {len(texts):,} documents" in run_command(*options, "--resume").stderr
    assert not journal.exists()
    found = _lines(out.read_text("utf-8"))
    assert sorted(each["index"] for each in found) == [*range(len(texts))]
    scores = [each["score"] for each in found]
    assert scores == sorted(scores, reverse=True)
    some = {each["index"]: each["score"] for each in found if each["index"] % 64 == 0}
    with _engine() as engine:
        expected = engine.score(QUERY, [texts[i] for i in some]).scores
    assert [*some.values()] == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_ctrl_c_without_a_file_prints_what_there_is(tmp_path: Path) -> None:
    file, out, said = (tmp_path / name for name in ("documents.txt", "out", "said"))
    file.write_text("\n".join(f"{i} {TEXTS[i % 4]}" for i in range(20000)), encoding="utf-8")
    command = ["score", "--query", QUERY, "--documents", str(file), *FLOAT32, "--threads", "1"]
    process = Program(command).start(out, said)
    wait_for(lambda: said.exists() and bool(re.search(r"\b[1-9][\d,]* of 20,000", said.read_text())))
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == 130
    assert "documents left" in said.read_text()
    indices = [each["index"] for each in _lines(out.read_text())]
    assert 0 < len(indices) < 20000
    assert indices == sorted(indices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--documents", "/nowhere"], "does not exist"),
        (["--documents", "{folder}/a.jsonl", "--field", "x"], "line 1"),
        (["--documents", "{folder}/a.jsonl", "--out", "{folder}/none/a"], "there is no folder for"),
        (["--documents", "{folder}/a.jsonl", "--resume"], "--resume needs --out"),
        (["/no/model", "--documents", "{folder}/a.jsonl"], "there is no folder"),
        (["--documents", "{folder}/a.jsonl", "--device", "cuda"], "CUDA"),
        (["--documents", "{folder}/empty.txt"], "there is no text in"),
        (["--documents", "{folder}/pdf"], "broken.pdf cannot be read as a PDF"),
        (["--documents", "{folder}/pdf", "--field", "a"], "--field are for files, not for a folder"),
        (["--documents", "{folder}/data"], "there is no picture, PDF or text in"),
        (["--documents", "{folder}/text"], "latin.txt cannot be read"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    for name, content in {
        "a.jsonl": b'{"text": "a"}\n', "empty.txt": b"\n", "pdf/broken.pdf": b"%PDF-1.4 broken",
        "data/data.bin": b"\x00", "text/latin.txt": b"\xe4",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    words = [each.format(folder=tmp_path) for each in arguments]
    ran = CliRunner().invoke(main, ["rerank", "--query", "q", *words])
    assert ran.exit_code in (1, 2)
    assert message in ran.stderr
    assert isinstance(ran.exception, SystemExit), "there is no traceback"
    assert len([line for line in ran.stderr.splitlines() if line.startswith("Error")]) == 1


def test_texts_are_embedded(tmp_path: Path, bge: str, small_engine: SyncEngine) -> None:
    file, out, tokens = (tmp_path / name for name in ("texts.jsonl", "vectors.npy", "tokens.npz"))
    file.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)), "utf-8")
    one = small_engine.embed(TEXTS, input_type="document").embeddings
    each = small_engine.embed_tokens(TEXTS).embeddings

    def embed(*options: str, status: int = 0) -> Result:
        ran = CliRunner().invoke(main, ["embed", bge, "--texts", str(file), *FLOAT32, *options])
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


def test_eval_is_ir_measures(tmp_path: Path, bge: str, small_engine: SyncEngine, pairs: list[Pair]) -> None:
    texts = [pair.document[:200] for pair in pairs[:20]]
    documents = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(texts)]
    queries = [{"_id": f"q{i}", "text": pair.query} for i, pair in enumerate(pairs[:12])]
    qrels = {f"q{i}": {f"d{(i + step) % 20}": 2 - step for step in range(3)} for i in range(12)}
    rows = [f"{query}\t{document}\t{grade}" for query, of in qrels.items() for document, grade in of.items()]
    (tmp_path / "qrels").mkdir()
    for name, records in (("corpus", documents), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    (tmp_path / "qrels/test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]))
    (tmp_path / "other.txt").write_text("x 0 y 1\n", encoding="utf-8")
    more_judged = tmp_path / "more.tsv"
    more_judged.write_text("\n".join([*rows, "q0\tnone\t1", "q99\td0\t1"]), encoding="utf-8")

    def evaluated(*more: str) -> Result:
        return CliRunner().invoke(main, ["eval", bge, *FLOAT32, "--data", str(tmp_path), *more])

    scores = {each["_id"]: small_engine.score(each["text"], texts).scores for each in queries}
    by_hand = {name: {f"d{j}": score for j, score in enumerate(of)} for name, of in scores.items()}
    measures = [ir_measures.nDCG @ 10, ir_measures.RR, ir_measures.R @ 100]
    expected = ir_measures.calc_aggregate(measures, qrels, by_hand)
    best = expected[measures[0]]
    run_file = tmp_path / "run.txt"
    assert 0 < best < 1
    assert f"nDCG@10    {best:.4f}" in evaluated("--run", str(run_file)).stdout
    again = ir_measures.calc_aggregate(measures, qrels, ir_measures.read_trec_run(str(run_file)))
    assert again == pytest.approx(expected, abs=1e-9)

    of_best = evaluated("--candidates", str(run_file), "--depth", "10", "--json", "--measure", "nDCG@10")
    assert json.loads(of_best.stdout) == pytest.approx({"nDCG@10": best}, abs=1e-9)
    assert "compare their ids" in evaluated("--qrels", str(tmp_path / "other.txt")).stderr
    missing = evaluated("--qrels", str(more_judged)).stderr
    assert "1 of 25 relevant documents are not among the documents" in missing
    assert "1 judged queries are not among the queries" in missing

    baseline = tmp_path / "baseline.txt"
    baseline.write_text("".join(f"q{i} Q0 d{i} 1 1.0 x\n" for i in range(12)), encoding="utf-8")
    table = tmp_path / "queries.csv"
    beside = evaluated("--json", "--measure", "RR", "--baseline", str(baseline), "--per-query", str(table))
    per_query = {each["query"]: float(each["RR"]) for each in csv.DictReader(table.open(encoding="utf-8"))}
    of_hand = {each.query_id: each.value for each in ir_measures.iter_calc([measures[1]], qrels, by_hand)}
    assert per_query == pytest.approx(of_hand)
    below = sum(value < 1 for value in of_hand.values())
    found = json.loads(beside.stdout)["RR"]
    assert found == pytest.approx(
        {"value": expected[measures[1]], "baseline": 1.0, "p": 2 * 0.5**below}, abs=1e-3
    )
    asked = (bge, f"{bge}=sparse", *FLOAT32, "--data", str(tmp_path))
    compared = run_command("compare", *asked, status=1)
    assert f"Error: {bge}=sparse: " in compared.stderr
    names, row = (re.split(r"  +", line) for line in compared.stdout.splitlines())
    shown = dict(zip(names, row, strict=True))
    assert (shown["kind"], shown["agreement"], shown["nDCG@10"]) == ("bi-encoder", "1.000", f"{best:.4f}")
    (tmp_path / "spaced.tsv").write_text("a b\ttext", "utf-8")
    spaced = evaluated("--documents", str(tmp_path / "spaced.tsv"), "--run", str(run_file))
    assert "--run cannot hold the id 'a b'" in spaced.stderr
    assert "holds no run" in evaluated("--baseline", os.devnull).stderr
    told = {"nope": "no such", "P@0": "at least 1", "RBP@10": "Unsupported", "INSQ": "invalid param"}
    for name, reason in told.items():
        refused = evaluated("--measure", name).stderr
        assert (reason in refused, "Loading" in refused) == (True, False), refused


def drawn(seed: int) -> Image.Image:
    """A picture of large areas, which JPEG, as PDFs have it, hardly changes."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((300, 200), Image.Resampling.NEAREST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    drawn(1).save(folder / "a.png")
    (folder / "inner").mkdir()
    drawn(2).save(folder / "inner" / "b.JPG", quality=95)
    options = {"resolution": 150, "quality": 95}
    drawn(3).save(folder / "report.pdf", save_all=True, append_images=[drawn(4)], **options)
    (folder / "notes.txt").write_text("a text among the pages", encoding="utf-8")
    (folder / "data.bin").write_bytes(b"\x00")
    (folder / ".hidden.png").write_bytes(b"no picture")
    return folder


def test_each_page_and_text_of_a_folder_is_a_document(folder: Path, checkpoints: SharedCheckpoints) -> None:
    checkpoint = checkpoints(visual.colpali)
    with SyncEngine(EngineConfig(model=checkpoint, dtype="float32"), progress=False) as engine:
        pages = [page.read(PictureLimits()) for page in pages_of(folder / "report.pdf")]
        pictures = [Image.open(folder / name) for name in ("a.png", "inner/b.JPG")]
        scores = engine.score(QUERY, [*pictures, "a text among the pages", *pages]).scores
    names = ["a.png", "inner/b.JPG", "notes.txt", "report.pdf page 1", "report.pdf page 2"]
    ran = run_command("rerank", checkpoint, "--query", QUERY, "--documents", str(folder), *FLOAT32)
    found = {each["id"]: each["score"] for each in _lines(ran.stdout)}
    assert found == pytest.approx(dict(zip(names, scores, strict=True)), abs=1e-5)
    assert "5 of 5 documents" in ran.stderr


def test_a_page_of_a_pdf_is_drawn_as_it_looks(folder: Path) -> None:
    for page, seed in zip(pages_of(folder / "report.pdf"), (3, 4), strict=True):
        picture = page.read(PictureLimits())
        assert (picture.width, picture.height) == (300, 200)
        assert np.abs(picture.pixels.astype(int) - np.asarray(drawn(seed)).astype(int)).mean() < 4
    with pytest.raises(PictureError, match="has 300 x 200 pixels, but may have 50,000"):
        pages_of(folder / "report.pdf")[0].read(PictureLimits(pixels=50_000))
    grey = folder.parent / "grey.pdf"
    drawn(6).resize((900, 3)).save(grey, resolution=150)
    with pytest.raises(PictureError, match="at most 200 times as long as wide"):
        pages_of(grey)[0].read(PictureLimits())
    drawn(6).convert("L").save(grey, resolution=150)
    (page,) = pages_of(grey)
    picture = page.read(PictureLimits())
    assert picture.pixels.shape == (200, 300, 3)
