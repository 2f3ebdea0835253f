"""The benchmarks measure what they say; those of a GPU and its first day are run small and on a CPU."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from click.testing import CliRunner, Result

from maxsimd.api.cli import main
from maxsimd.bench import pages
from maxsimd.bench.checkpoints import gflop_a_token, save_reranker, unigram_tokenizer
from maxsimd.bench.datasets import mixed_counts, random_requests
from maxsimd.bench.gpu.first_day import Step, run_steps
from maxsimd.bench.gpu.kernels import Run, prepared
from maxsimd.bench.load import SentenceTransformers, System, maxsimd, processes_titled
from maxsimd.bench.methods import GPU_TOKENS_A_SECOND
from maxsimd.bench.peers import OURS, QUANTIZED, SHAPES, Arena, Load, Results, markdown
from maxsimd.bench.peers import Outcome as PeerOutcome
from maxsimd.bench.report import Outcome, Report, run_and_clean_up
from maxsimd.engine import EngineConfig
from maxsimd.engine.ops import cpu as kernels
from tests.processes import process_of
from tests.waiting import wait_for


async def test_pages_with_equal_scores_come_before_the_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MagicMock()
    engine.return_value.__aenter__.return_value.score.return_value.scores = [1.0] * 3
    monkeypatch.setattr(pages, "Engine", engine)
    found = await pages.measure_page_ranking(EngineConfig(), 3, 2)
    assert (found["mrr"], found["first"]) == (pytest.approx(1 / 3, abs=1e-4), 0.0)


def test_requests_have_the_lengths_and_documents_asked_for() -> None:
    counts = mixed_counts("2:0.9,50:0.1", 1000, seed=0)
    assert set(counts) == {2, 50}
    assert 60 <= counts.count(50) <= 140
    for shared, queries in ((True, 1), (False, 10)):
        requests = random_requests(10, 4, input_len=100, range_ratio=0.5, shared_query=shared, seed=0)
        assert len({request.query for request in requests}) == queries
        for request in requests:
            assert 24 <= len(request.query.split()) <= 74
            assert all(25 <= len(document.split()) <= 75 for document in request.documents)
    requests = random_requests(3, [1, 5, 2], 20, 0.5, shared_query=False, seed=0)
    assert [len(request.documents) for request in requests] == [1, 5, 2]
    for wrong in ("2", "2:0.9", "0:0.5,1:0.5", "a:1"):
        with pytest.raises(ValueError):  # noqa: PT011 (int() words its own)
            mixed_counts(wrong, 10, seed=0)


def test_reports_count_failures_apart_and_show_ratios() -> None:
    outcomes = [Outcome(0.1, 10, 100, rank=1), Outcome(0.3, 10, 100, rank=2), Outcome(9, 10, 0, error="429")]
    figures = Report({"target": "x"}, 2.0, outcomes).figures()
    assert (figures["requests"], figures["failures"], figures["tokens"]) == (3, 1, 200)
    assert (figures["documents_per_s"], figures["mrr"]) == (10.0, 0.75)
    assert figures["latency_median_ms"] == pytest.approx(200)
    turns = {
        system: [{"documents_per_s": rate, "tokens_per_s": 100 * rate} for rate in rates]
        for system, rates in ((OURS, (10, 40, 20)), (QUANTIZED, (30, 60, 50)), ("vLLM bfloat16", (5, 10, 8)))
    }
    limits = {"float32": 200.0, "bfloat16": 400.0, "int8": 800.0, "copy": 30.0}
    results = Results(limits, {"cross-encoder": 0.02}, {"cross-encoder": [PeerOutcome(100, 8, turns)]})
    # 800 tokens/s x 0.02 GFLOP of 400 GFLOP/s. Ratios are those of each round: 10/5, 40/10, 20/8.
    assert "| vLLM bfloat16 | 8.0 | 800 | 4% | 2.50 x | 6.00 x |" in markdown(results).splitlines()
    shape = next(iter(SHAPES))
    results = Results(limits, {shape: 0.1}, {shape: [PeerOutcome(1, 1, turns)]})
    assert markdown(results).splitlines()[-1].endswith("| 20.00 | 50.00 | 8.00 | 2.50 | 6.00 | 50% | 62% |")


def test_commands_measure_and_write_their_figures(tmp_path: Path) -> None:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["bench", *arguments])

    def written(*arguments: str) -> tuple[Any, Any]:
        result = run(*arguments, "--json", str(file))
        assert result.exit_code == 0, result.output
        found = json.loads(file.read_text())
        return found["settings"], found["figures"]

    file, vocabulary = tmp_path / "figures.json", tmp_path / "tokenizer.json"
    _, figures = written("engine", "--num-requests", "3", "--documents", "5", "--warmup", "1")
    assert (figures["requests"], figures["failures"], 0 < figures["mrr"] <= 1) == (3, 0, True)
    _, figures = written("allpool", "--sequences", "8", "--tokens", "20", "--hidden", "16", "--rounds", "2")
    assert figures["sequence_by_sequence_ms"] > 0
    _, figures = written("products", "--rows", "40", "--rounds", "1")
    assert all(each["share_of_peak"] > 0 for each in figures.values())
    assert bool(figures) is kernels.is_available()
    settings, figures = written("cache", "--documents", "5", "--rounds", "1", "--threads", "1")
    assert settings == {"documents": 5, "rounds": 1, "threads": 1}
    assert figures["kendall_tau"] > 0.9
    unigram_tokenizer(1_000).save(str(vocabulary))
    _, figures = written("tokenizer", str(vocabulary), "--threads", "1,2", "--rounds", "1")
    assert (figures["entries"], 1 < figures["characters_a_token"] < 10) == (1_000, True)
    needed = GPU_TOKENS_A_SECOND / figures["tokens_per_s_1_threads"]
    assert figures["threads_for_a_gpu"] == pytest.approx(needed, abs=1)
    layer = 4 * 384 * 384 + 2 * 384 * 1536
    assert gflop_a_token(save_reranker("minilm-l6", tmp_path / "model")) == pytest.approx(12 * layer / 1e9)
    for command in () if torch.cuda.is_available() else ("gpu", "kernels"):
        assert "there is none" in run(command).output
    refused = run("several", "one")
    assert (refused.exit_code, "name two models or none, not 1" in refused.output) == (2, True)
    unserved = run("serve", "--url", "http://127.0.0.1:9")
    assert (unserved.exit_code, unserved.stdout) == (1, "")
    assert unserved.stderr.startswith("Error: no server answers at http://127.0.0.1:9; start one with")
    listed = [re.findall(r"^  ([a-z]\S*)", run(*asked).output, re.MULTILINE) for asked in (["-h"], ["--all"])]
    assert listed[0] == ["serve", "engine", "cache", "files", "overload", "peers", "startup"]
    assert {*listed[0], "kernels", "tokenizer"} < {*listed[1]}


@pytest.mark.exhaustive
async def test_systems_take_turns_with_one_checkpoint(bert_cross_encoder: str) -> None:
    systems: list[System] = [maxsimd("maxsimd"), SentenceTransformers("peer", "float32")]
    async with AsyncExitStack() as stack:
        arena = await Arena.enter(stack, systems, bert_cross_encoder)
        outcome = await arena.run(Load(requests=4, documents=3, concurrency=2), rounds=2)
        paired = await arena.run(Load(requests=1, documents=5, concurrency=1, paired=True), rounds=1)
    assert {name: len(turns) for name, turns in outcome.turns.items()} == {"maxsimd": 2, "peer": 2}
    for each in (outcome, paired):
        assert each.median("maxsimd", "tokens_per_s") > each.median("maxsimd", "documents_per_s")


def test_a_benchmark_that_is_ended_stops_what_it_started() -> None:
    stopped = []

    async def measure() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(3600)
        finally:
            stopped.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_and_clean_up(measure())
    assert (stopped, signal.getsignal(signal.SIGTERM)) == ([True], before)


def test_processes_are_found_by_titles_of_any_bytes() -> None:
    words = [b"titled \xff", b"-c", b"read"]
    with subprocess.Popen(words, executable="/bin/bash", stdin=subprocess.PIPE) as process:
        wait_for(lambda: processes_titled("titled") == [process.pid])


def test_a_step_that_fails_hides_none_of_those_after_it(tmp_path: Path) -> None:
    python = (sys.executable, "-c")
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid); time.sleep(600)"
    steps = [
        Step("before", (*python, "print('found: [\"limits: product_tflops\", 399.0]')"), 30),
        Step("fails", (*python, "print('attention by triton is not used: why'); exit(3)"), 30),
        Step("dies", (*python, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), 30),
        Step("hangs", (*python, child), 2.0),
        Step("after", (*python, "print('found: [\"limits: copy_tbytes_per_s\", 9]')"), 30),
    ]
    run_steps(steps, tmp_path, 60, "NVIDIA H200")
    table = (tmp_path / "first-day.txt").read_text()
    for expected in ("FAILED", "OVER TIME", "attention by triton is not used: why", "MISSED"):
        assert expected in table
    written = json.loads((tmp_path / "first-day.json").read_text())
    assert [step["status"] for step in written["steps"]] == [0, 3, -11, None, 0]
    assert [row["met"] for row in written["predictions"]] == [False, True]
    pid = next(int(line) for line in (tmp_path / "first-day.log").read_text().splitlines() if line.isdigit())
    wait_for(lambda: process_of(pid) is None)  # what a step started ends with it
    late = run_steps(steps[:2], tmp_path, 0.0, "GPU")
    assert [outcome.verdict for outcome in late] == ["OVER TIME"] * 2, "no time is left for them"


@pytest.mark.exhaustive
def test_the_first_day_runs_small_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    given = {"OUT": str(tmp_path), "GPU_PYTHON": sys.executable, "OFFLINE": str(tmp_path / "none")}
    ran = subprocess.run(
        ["bench/gpu/first_day.sh", "--dry"], cwd=Path(__file__).parents[3], env=os.environ | given,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = json.loads((tmp_path / "first-day.json").read_text())
    assert {step["status"] for step in written["steps"]} == {0}
    assert any(step["found"] for step in written["steps"])
    assert (tmp_path / "first-day.txt").read_text() in ran.stdout


def test_a_contender_that_fails_or_is_wrong_is_not_timed() -> None:
    def times(factor: Any) -> Callable[[torch.Tensor], Run]:
        return lambda data: lambda: data * factor

    factors = {"right": 1.001, "wrong": 1.1, "empty": torch.nan, "broken": None}
    ready = prepared({n: times(x) for n, x in factors.items()}, [torch.ones(4), torch.ones(4)], torch.ones(3))
    assert list(ready.runs) == ["right"]
    assert ready.failures == {
        "wrong": "its results differ by 0.1 of the largest",
        "empty": "its results differ by nan of the largest",
        "broken": "TypeError: unsupported operand type(s) for *: 'Tensor' and 'NoneType'",
    }
