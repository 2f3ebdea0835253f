"""The kernels of fused layers: interpreted on a CPU against plain torch, and compiled for GPUs."""

from collections.abc import Callable
from itertools import product

import pytest

from maxsimd.bench.gpu.ahead_of_time import compiled
from maxsimd.bench.gpu.layer_kernels import variants
from tests.unit.engine.ops.interpreted import run_interpreted
from tests.unit.engine.ops.layer_kernel_checks import CHECKS

pytest.importorskip("triton")

from maxsimd.engine.ops.triton.rows import row_tile


@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_equals_plain_torch_when_interpreted(check: Callable[[str], None]) -> None:
    run_interpreted(check, "cpu")


# Compiling, for every generation that has tiles of its own, without a register in memory.


@pytest.mark.exhaustive
@pytest.mark.parametrize(("capability", "dtype"), product((80, 90, 100), ("bf16", "fp16", "fp32")))
def test_kernels_compile_without_spills(capability: int, dtype: str) -> None:
    tried = 0
    for variant in variants(dtype):
        code = compiled(variant.source, capability)
        assert code.spills == 0, variant.name
        assert code.shared <= 227 * 1024, variant.name
        tried += 1
    assert tried >= 14


def test_a_row_is_read_16_bytes_at_a_time() -> None:
    """In 16 bits, where the row is as wide as the program; and no register is in memory."""
    found = {variant.name: variant for variant in variants("bf16")}
    for name, loads in {"add and RMS norm 1024": 3, "add and layer norm 1024": 4, "SwiGLU 3072": 2}.items():
        code = compiled(found[name].source, 90)
        assert (code.wide_loads, code.spills) == (loads, 0), name


@pytest.mark.parametrize("width", [1, 16, 384, 1024, 8192])
def test_a_row_fits_its_tile(width: int) -> None:
    tile = row_tile(width)
    assert tile.numbers >= width
    assert tile.numbers <= max(16, 2 * width - 1)
    assert 1 <= tile.warps <= 16
