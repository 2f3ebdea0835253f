"""The benchmarks measure what they say."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from maxsimd.api.cli import main
from maxsimd.bench.candidates import Bm25
from maxsimd.bench.datasets import docstring_pairs, docstring_requests, random_requests
from maxsimd.bench.load import _rank
from maxsimd.bench.report import Outcome, Report


def test_docstring_requests_hold_the_querys_own_document_and_no_other_twice() -> None:
    own = {pair.query: pair.document for pair in docstring_pairs()}
    requests = docstring_requests(20, 50, seed=3)
    assert requests == docstring_requests(20, 50, seed=3)
    assert len({request.query for request in requests}) == 20
    for request in requests:
        assert request.answer is not None
        assert request.documents[request.answer] == own[request.query]
        assert len(request.documents) == len(set(request.documents)) == 50


def test_bm25_finds_the_document_with_the_rare_word() -> None:
    index = Bm25(["the cat and the dog", "the axolotl", "the dog and the dog", "a cat"])
    assert index.best("the axolotl", 1) == [1]
    assert index.best("Dog", 2) == [2, 0]


@pytest.mark.parametrize("shared", [True, False])
def test_random_requests_have_the_lengths_asked_for(shared: bool) -> None:
    requests = random_requests(10, 4, input_len=100, range_ratio=0.5, shared_query=shared, seed=0)
    assert len({request.query for request in requests}) == (1 if shared else 10)
    for request in requests:
        assert 24 <= len(request.query.split()) <= 74
        assert all(25 <= len(document.split()) <= 75 for document in request.documents)


def test_a_tie_counts_against_the_known_answer() -> None:
    request = docstring_requests(1, 3, seed=0)[0]
    assert request.answer is not None
    assert _rank(request, dict.fromkeys(range(3), 1.0)) == 3
    assert _rank(request, {i: float(i == request.answer) for i in range(3)}) == 1


def test_a_report_counts_failures_apart() -> None:
    outcomes = [Outcome(0.1, 10, 100, rank=1), Outcome(0.3, 10, 100, rank=2), Outcome(9, 10, 0, error="429")]
    figures = Report({"target": "x"}, 2.0, outcomes).figures()
    assert (figures["requests"], figures["failures"], figures["tokens"]) == (3, 1, 200)
    assert (figures["documents_per_s"], figures["mrr"]) == (10.0, 0.75)
    assert figures["latency_median_ms"] == pytest.approx(200)


def test_the_command_measures_the_engine_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--num-requests", "3", "--documents", "5", "--warmup", "1", "--json", str(file)]
    result = CliRunner().invoke(main, ["bench", "engine", *arguments])
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())["figures"]
    assert (figures["requests"], figures["failures"]) == (3, 0)
    assert 0 < figures["mrr"] <= 1


def test_pooling_is_measured_as_a_method() -> None:
    arguments = ["--sequences", "8", "--tokens", "20", "--hidden", "16", "--rounds", "2"]
    result = CliRunner().invoke(main, ["bench", "allpool", *arguments])
    assert result.exit_code == 0, result.output
    assert "sequence by sequence" in result.output
