"""The benchmarks of a GPU and its first day, run small and on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from maxsimd.api.cli import main
from maxsimd.bench.gpu.first_day.__main__ import run_steps
from maxsimd.bench.gpu.first_day.steps import Step
from maxsimd.bench.gpu.first_day.supervised import run_cases
from maxsimd.bench.gpu.kernels import prepared
from maxsimd.bench.timing import Run
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]


def script(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_step_that_fails_hides_none_of_those_after_it(tmp_path: Path) -> None:
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid); time.sleep(600)"
    steps = [
        Step("before", script("print('found: [\"limits: product_tflops\", 399.0]')"), 30),
        Step("fails", script("import sys; print('attention by varlen is not used: why'); sys.exit(3)"), 30),
        Step("dies", script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), 30),
        Step("hangs", script(child), 2.0),
        Step("after", script("print('found: [\"kernels: cases that failed\", 0]')"), 30),
    ]
    outcomes = run_steps(steps, tmp_path, 60, "NVIDIA H200")
    assert [outcome.status for outcome in outcomes] == [0, 3, -11, None, 0]
    assert [outcome.passed for outcome in outcomes] == [True, False, False, False, True]
    table = (tmp_path / "first-day.txt").read_text()
    for expected in ("FAILED", "OVER TIME", "attention by varlen is not used: why", "MISSED"):
        assert expected in table
    written = json.loads((tmp_path / "first-day.json").read_text())
    assert [step["status"] for step in written["steps"]] == [0, 3, -11, None, 0]
    assert [row["met"] for row in written["predictions"]] == [False, True]
    pid = next(int(line) for line in (tmp_path / "first-day.log").read_text().splitlines() if line.isdigit())
    wait_for(lambda: has_ended(pid))  # what a step started ends with it
    late = run_steps(steps[:2], tmp_path, 0.0, "GPU")
    assert [outcome.verdict for outcome in late] == ["OVER TIME"] * 2, "no time is left for them"


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for nothing but to be noticed by the one that started it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


CASES = """
import os, sys, time
for index in map(int, sys.argv[sys.argv.index("--cases") + 1].split(",")):
    if index == 1:
        print("illegal address", flush=True)
        os._exit(7)
    if index == 3:
        time.sleep(60)
    print(("WRONG: " if index == 4 else "right: ") + f"case {index}", flush=True)
"""


def test_cases_after_one_that_breaks_its_process_run_in_another() -> None:
    results = list(run_cases(script(CASES), [0, 1, 2, 3, 4], seconds=2.0))
    assert [result.index for result in results] == [0, 1, 2, 3, 4]
    died = "its process ended with 7 / illegal address"
    assert [result.failure for result in results] == [None, died, None, "it hung", "case 4"]


@pytest.mark.exhaustive
def test_the_first_day_runs_small_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    ran = subprocess.run(
        ["bench/gpu/first_day.sh", "--dry"],
        cwd=ROOT,
        env=os.environ
        | {"OUT": str(tmp_path), "GPU_PYTHON": sys.executable, "OFFLINE": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = json.loads((tmp_path / "first-day.json").read_text())
    assert {step["status"] for step in written["steps"]} == {0}
    assert any(step["found"] for step in written["steps"])
    assert (tmp_path / "first-day.txt").read_text() in ran.stdout


def test_a_contender_that_fails_or_is_wrong_is_not_timed() -> None:
    def broken(data: torch.Tensor) -> Run:
        raise RuntimeError("no such kernel")

    ready = prepared(
        {
            "right": lambda data: lambda: data * 1.001,
            "wrong": lambda data: lambda: data * 1.1,
            "empty": lambda data: lambda: data * torch.nan,
            "broken": broken,
        },
        [torch.ones(4), torch.ones(4)],
        torch.ones(3),
    )
    assert list(ready.runs) == ["right"]
    assert ready.failures == {
        "wrong": "its results differ by 0.1 of the largest",
        "empty": "its results differ by nan of the largest",
        "broken": "RuntimeError: no such kernel",
    }


def test_without_a_gpu_the_commands_say_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for command in ("gpu", "kernels"):
        result = CliRunner().invoke(main, ["bench", command])
        assert result.exit_code == 1
        assert "there is none" in result.output
