"""The kernels of fused layers: interpreted on a CPU against plain torch, and compiled for GPUs."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from maxsimd.bench.gpu.ahead_of_time import compiled
from maxsimd.bench.gpu.bounds import H100, resident_programs, turn_cycles
from maxsimd.bench.gpu.layer_kernels import gelu_products, variants
from tests.unit.interpreted import run_interpreted
from tests.unit.layer_kernel_checks import CHECKS

pytest.importorskip("triton")

from maxsimd.engine.ops.triton import gelu_product
from maxsimd.engine.ops.triton.launch import Limits
from maxsimd.engine.ops.triton.rows import row_tile


@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_equals_plain_torch_when_interpreted(check: Callable[[str], None]) -> None:
    run_interpreted(check, "cpu")


# Compiling, for every generation that has tiles of its own, without a register in memory.


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, "bf16"),
        (80, "fp32"),
        *(
            pytest.param(capability, dtype, marks=pytest.mark.exhaustive)
            for capability, dtype in product((80, 90, 100), ("bf16", "fp16", "fp32"))
            if (capability, dtype) not in ((90, "bf16"), (80, "fp32"))
        ),
    ],
)
def test_kernels_compile_without_spills(capability: int, dtype: str) -> None:
    tried = 0
    for variant in variants(dtype):
        if capability == 80 and variant.name.startswith("gelu"):
            continue  # it is not launched there
        code = compiled(variant.source, capability)
        assert code.spills == 0, variant.name
        assert code.shared <= 227 * 1024, variant.name
        tried += 1
    assert tried >= 17


def test_a_row_is_read_16_bytes_at_a_time() -> None:
    """In 16 bits, where the row is as wide as the program."""
    found = {variant.name: variant for variant in variants("bf16")}
    for name, loads in {"add and RMS norm 1024": 3, "add and layer norm 1024": 4, "SwiGLU 3072": 2}.items():
        assert compiled(found[name].source, 90).wide_loads == loads, name


def test_the_gelu_product_is_ahead_of_a_product_and_a_pass() -> None:
    """By arithmetic, with the figures of the module's docstring: the cycles of the main loop and of all that
    comes before and after it, of programs that run one after the other on a multiprocessor."""
    tiles = gelu_product.TILES[0]
    code = compiled(next(gelu_products()).source, 90)
    assert resident_programs(code, H100) == 1
    turns = 1024 // tiles.depth
    around = (code.instructions - len(code.main_loop)) * code.warps / 4
    cycles = turns * turn_cycles(code, code.main_loop, H100).alone() + around
    programs = (16_384 // tiles.rows) * (4096 // tiles.columns)
    seconds = -(-programs // H100.multiprocessors) * cycles / (H100.clock * 1e9)
    floating = 2 * 16_384 * 1024 * 4096
    assert floating / seconds / 1e12 > 503, f"{floating / seconds / 1e12:.0f} TFLOP/s"


def test_tiles_are_smaller_where_a_device_would_be_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gelu_product, "limits", lambda device: Limits(9, 227 * 1024, 132))
    chosen = [gelu_product.tiles_for(torch.device("cpu"), rows, 4096) for rows in (16_384, 1_056, 512, 64)]
    assert [(tiles.rows, tiles.columns) for tiles in chosen] == [(128, 256), (128, 256), (64, 64), (64, 64)]


@pytest.mark.parametrize("width", [1, 16, 384, 1024, 8192])
def test_a_row_fits_its_tile(width: int) -> None:
    tile = row_tile(width)
    assert tile.numbers >= width
    assert tile.numbers <= max(16, 2 * width - 1)
    assert 1 <= tile.warps <= 16
