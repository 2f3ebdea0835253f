"""The kernels of fused layers: interpreted on a CPU against plain torch, and compiled ahead of time for GPUs."""

from collections.abc import Callable

import pytest
import torch

from tests.unit.interpreted import run_interpreted
from tests.unit.layer_kernel_checks import CHECKS

pytest.importorskip("triton")


@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_equals_plain_torch_when_interpreted(check: Callable[[str], None]) -> None:
    run_interpreted(check, "cpu")
