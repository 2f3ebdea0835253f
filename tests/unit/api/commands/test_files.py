"""Files of the commands: texts of all kinds that they read, and from which an interrupted run goes on."""

import csv
import io
import json
import operator
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import click
import pyarrow
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from maxsimd.api.cli import compare, main
from maxsimd.api.cli.files import Record, read_records
from maxsimd.api.cli.rank import Journal, digest_of, write

TEXTS = ["Open a file.", 'one, "two"', "Käse, 東京 and 🎉.", "a\tb"]


def _written(kind: str) -> bytes:
    ids = [f"d{i}" for i in range(len(TEXTS))]
    rows = [{"_id": i, "text": each} for i, each in zip(ids, TEXTS, strict=True)]
    text = {"lines": "\n\n".join(TEXTS), "jsonl": "\n".join(map(json.dumps, rows)), "json": json.dumps(TEXTS)}
    if kind in text:
        return text[kind].encode()
    if kind == "parquet":
        out = io.BytesIO()
        parquet.write_table(pyarrow.table({"id": ids, "passage": TEXTS}), out)
        return out.getvalue()
    table = io.StringIO()
    writer = csv.writer(table, delimiter="\t" if kind == "tsv" else ",")
    writer.writerows([["id", "body"], *zip(ids, TEXTS, strict=True)])
    return b"\xef\xbb\xbf" + table.getvalue().encode()


def test_files_of_all_kinds_hold_the_same_texts(tmp_path: Path) -> None:
    for kind in ("lines", "jsonl", "json", "csv", "tsv", "parquet"):
        file = tmp_path / ("documents.txt" if kind == "lines" else f"documents.{kind}")
        file.write_bytes(_written(kind))
        records = read_records(str(file), None, ())
        ids = [None] * 4 if kind in ("lines", "json") else [f"d{i}" for i in range(4)]
        assert records == [Record(text, id_) for text, id_ in zip(TEXTS, ids, strict=True)]
        other = tmp_path / "documents.unknown"
        other.write_bytes(_written(kind))
        assert read_records(str(other), "jsonl" if kind == "json" else kind, ()) == records


def test_lines_end_where_lines_end_and_fields_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a\u2028b", "c\x85d", "e\x0bf"]
    file, rows = tmp_path / "a.jsonl", [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    for path, lines in ((file, rows), (tmp_path / "a.txt", texts)):
        path.write_text("\r\n".join(lines), "utf-8")
        assert [record.text for record in read_records(str(path), None, ())] == texts
    file.write_text('{"title": "T", "text": "x", "n": 1}', encoding="utf-8")
    assert read_records(str(file), None, ("title", "text")) == [Record("T x")]
    assert read_records(str(file), None, ()) == [Record("x")]
    for data, kind, expected in (
        (b"one\ntwo", None, [Record("one"), Record("two")]),
        (b' {"content": "one", "id": 7}\n', None, [Record("one", "7")]),
        (b'["one", {"text": "two"}]', None, [Record("one"), Record("two")]),
        (b'\xef\xbb\xbf{"text": "one"}', None, [Record("one")]),
        (b'id\ttext\n2\t"open\n3\tt"t', "tsv", [Record('"open', "2"), Record('t"t', "3")]),
    ):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        assert read_records("-", kind, ()) == expected


def test_what_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content, message in (
        ("a.jsonl", b'{"text": "a"}\n{', "line 2 is no JSON"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "line 2 is no JSON: maximum recursion"),
        ("a.jsonl", b'{"x": "a"}', "line 1 has no text in text, content"),
        ("a.jsonl", b"7", "line 1 is no object with a text but int"),
        ("a.csv", b"x,y\n1,2\n", "row 2 has no text"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.csv", b'id,text\n2,"open quote\n3,three\n', "cannot be read: unexpected end of data"),
        ("a.jsonl", b"[" * 100_000, "cannot be read: maximum recursion"),
        ("a.txt", b" \n", "there is no text in"),
        ("a.parquet", b"PAR1", "cannot be read"),
        ("b.txt", None, "No such file"),
    ):
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(click.ClickException, match=message) as raised:
            read_records(str(file), None, ())
        assert str(file) in str(raised.value)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(click.ClickException, match=r"'\.\[files\]'"):
        read_records(str(tmp_path / "a.parquet"), None, ())
    monkeypatch.setattr(compare, "_rank", operator.call)
    with pytest.raises(click.ClickException, match="its process was killed"):
        compare._in_new_process(os._exit, 9)  # type: ignore[arg-type]


DIGEST = digest_of(["a", "b"])


def test_a_journal_keeps_what_was_added_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "out.part"
    with Journal(path, DIGEST, resume=True) as journal:
        journal.add({0: (1.5, 9.0), 2: (0.1, -2.0)}, {1: "too long"})
    with path.open("a") as file:
        file.write("[7, 0.")  # the run ended while it wrote
    with Journal(path, DIGEST, resume=True) as again:
        assert (again.scores, again.errors, again.done) == ({0: 1.5, 2: 0.1}, {1: "too long"}, 3)
        again.add({3: (2.0, 3.0)}, {})
    last = Journal(path, DIGEST, resume=True)
    assert (last.done, last.scores[3], last.ranking_scores) == (4, 2.0, {0: 9.0, 2: -2.0, 3: 3.0})
    for begun in ("", '{"maxsimd"'):
        path.write_text(begun)
        with Journal(path, DIGEST, resume=True) as journal:
            assert journal.done == 0
            journal.add({5: (3.0, 3.0)}, {})
        assert Journal(path, DIGEST, resume=True).scores == {5: 3.0}


def test_other_files_and_an_unasked_resume_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.part"
    with Journal(path, DIGEST, resume=False):
        assert path.exists()
    with Journal(path, DIGEST, resume=False) as journal:  # what has no score is left by no run
        journal.add({}, {0: "too long"})
    with pytest.raises(click.ClickException, match="belongs to another run"):
        Journal(path, digest_of(["ab"]), resume=True)
    with pytest.raises(click.ClickException, match="go on with --resume"):
        Journal(path, DIGEST, resume=False)
    path.write_text("a letter\nto somebody\n")
    with pytest.raises(click.ClickException, match="is no file of scores"):
        Journal(path, DIGEST, resume=True)
    assert path.read_text() == "a letter\nto somebody\n"


def test_links_are_followed_and_devices_written_into(tmp_path: Path) -> None:
    def write_to(out: Path) -> None:
        journal = Journal(None, DIGEST, resume=False)
        journal.scores[0] = 1.0
        write([0], journal, [Record("a")], "jsonl", str(out))

    line = '{"index": 0, "score": 1.0, "text": "a"}\n'
    plain, link, pipe = (tmp_path / name for name in ("plain", "link", "pipe"))
    plain.write_text("before")
    link.symlink_to(plain)
    write_to(link)
    assert (link.is_symlink(), plain.read_text()) == (True, line)
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(pipe.read_text)
        write_to(pipe)
        assert read.result(600) == line
    with pytest.raises(click.ClickException, match="cannot write /dev/full: no space left on device"):
        write_to(Path("/dev/full"))
    assert Path("/dev/full").is_char_device()
    assert {each.name for each in tmp_path.iterdir()} == {"plain", "link", "pipe"}


def test_ctrl_c_has_the_status_that_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.commands["version"], "callback", Mock(side_effect=KeyboardInterrupt))
    ended = CliRunner().invoke(main, ["version"])
    assert (ended.exit_code, ended.output) == (130, "interrupted\n")
