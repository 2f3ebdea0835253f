"""The Triton kernels with the oldest triton that we allow, in an environment of its own: the tests of kernels
are run there, interpreted and compiled ahead of time."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.oldest_triton import REQUIREMENTS, interpreter

ROOT = Path(__file__).parents[4]
# The files whose tests interpret or compile kernels.
FILES = sorted(
    path for path in Path(__file__).parent.glob("test_*_kernels.py") if "run_interpreted" in path.read_text()
)
# Interpreted kernels, and those compiled for the generation that most GPUs here have, in bfloat16.
FEW = "interpreted or (compile and 90 and not fp)"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")


def run_tests(*options: str) -> None:
    command = [interpreter(), "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *map(str, FILES)]
    # Not as a worker of the tests that run this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout


def test_the_environment_has_the_oldest_triton_that_we_allow() -> None:
    code = "import triton, torch; print(triton.__version__, torch.__version__)"
    ran = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, check=True)
    triton, torch = ran.stdout.split()
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    [oldest] = [line for line in stated if line.startswith("triton>=")]
    assert oldest.split(";")[0] == "triton>=" + triton.removesuffix(".0")
    assert f"triton=={triton}" in REQUIREMENTS.read_text()
    assert torch == pytest.importorskip("torch").__version__


def test_the_most_important_kernels_are_right() -> None:
    run_tests("-k", FEW, "-m", "not exhaustive")


@pytest.mark.exhaustive
def test_all_kernels_are_right() -> None:
    run_tests("-m", "not exhaustive")
