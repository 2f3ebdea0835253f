"""Tests of kernels, run with the oldest triton that we allow, in an environment of its own."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.forked import SOCKET
from tests.oldest_triton import REQUIREMENTS, interpreter

ROOT = Path(__file__).parents[4]
# The files whose tests interpret or compile kernels.
FILES = sorted(
    path for path in Path(__file__).parent.glob("test_*_kernels.py") if "run_interpreted" in path.read_text()
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")


def test_the_oldest_triton_is_the_one_that_pyproject_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (line,) = project["optional-dependencies"]["cuda"]
    assert line.split(";")[0].replace(">=", "==") + ".0" in REQUIREMENTS.read_text().split()


@pytest.mark.exhaustive
def test_all_kernels_are_right_with_the_oldest_triton() -> None:
    code = "import triton, torch; print(triton.__version__, torch.__version__)"
    ran = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, check=True)
    found, of_torch = ran.stdout.split()
    assert f"triton=={found}" in REQUIREMENTS.read_text()
    assert of_torch == torch.__version__
    command = [interpreter(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive"]
    # Not as a worker of the tests that run this one, whose copies have this environment's triton.
    others = ("PYTEST_", SOCKET)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    ran = subprocess.run(
        [*command, *map(str, FILES)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
