"""The Triton kernels: interpreted on a CPU against plain torch, and compiled ahead of time for GPUs."""

import importlib.metadata
from collections.abc import Callable
from itertools import product

import pytest

from maxsimd.bench.gpu.ahead_of_time import H100, compiled, most_tflops, resident_programs
from maxsimd.bench.gpu.compiled import LIMITS, AttentionLaunch, layer_variants, projection_source
from maxsimd.engine.ops.triton.launch import Limits, next_power_of_two
from tests.exhaustive import exhaustive
from tests.unit.engine.ops.interpreted import run_interpreted
from tests.unit.engine.ops.kernel_checks import CHECKS, check_maxsim_of_all_sizes

pytest.importorskip("triton")
SLOW = (check_maxsim_of_all_sizes,)


@pytest.mark.parametrize("check", [*(check for check in CHECKS if check not in SLOW), *exhaustive(*SLOW)])
def test_a_kernel_equals_plain_torch_when_interpreted(check: Callable[[str], None]) -> None:
    run_interpreted(check, "cpu")


# Compiling, for every generation that has a table of its own: a few kernels, and all before a release.

# All that a sequence can be: with both causal variants a prefix, which a program passes over as well.
VARIANTS = [(True, True, True), (True, False, True), (False, True, False)]
FEW_ATTENTION = [(*each, *VARIANTS[0]) for each in (("bf16", 64, 90), ("bf16", 128, 100), ("fp32", 128, 80))]
PROJECTIONS = product(("fp32", "bf16", "fp16"), (80, 90, 100), (128, 1024))
FEW_PROJECTIONS = [("bf16", 90, 128), ("fp32", 80, 1024)]

ATTENTION = [
    (dtype, head_dim, capability, *variant)
    for dtype, heads in (("bf16", (64, 80, 128, 256)), ("fp16", (64,)), ("fp32", (64, 128, 256)))
    for head_dim, capability, variant in product(heads, LIMITS, VARIANTS)
]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "causal", "windowed", "prefixed"),
    [*FEW_ATTENTION, *exhaustive(*(each for each in ATTENTION if each not in FEW_ATTENTION))],
)
def test_attention_compiles_without_spilling_registers(
    dtype: str, head_dim: int, capability: int, causal: bool, windowed: bool, prefixed: bool
) -> None:
    launch = AttentionLaunch(capability, head_dim, dtype, causal, windowed, prefixed)
    code = compiled(launch.source, capability)
    for loop in code.loops:
        assert loop.count(lambda instruction: "LDL" in instruction or "STL" in instruction) == 0
    # Before its loops, a kernel compiled by Triton 3.6 puts a few aside.
    assert code.spills <= (0 if importlib.metadata.version("triton") >= "3.9" else 4)
    assert code.shared <= LIMITS[capability].shared_memory


@pytest.mark.parametrize(
    ("head_dim", "causal", "most_instructions", "least_tflops", "programs"),
    [(64, False, 330, 770, 4), (128, True, 400, 900, 2)],
)
def test_attention_on_an_h100_is_not_bound_by_instructions(
    head_dim: int, causal: bool, most_instructions: int, least_tflops: float, programs: int
) -> None:
    code = compiled(AttentionLaunch(90, head_dim, causal=causal).source, 90)
    assert len(code.main_loop) <= most_instructions
    assert resident_programs(code, H100) >= programs
    assert most_tflops(code, H100) >= least_tflops


def test_attention_has_tiles_for_every_head_and_device() -> None:
    from maxsimd.engine.ops.triton import attention

    sizes = product((24, 32, 64, 80, 128, 256), (0, 48, 99, 163, 227), (2, 4), (False, True))
    for head_dim, kibibytes, itemsize, windowed in sizes:
        tiles = attention.tiles_for(Limits(0, kibibytes * 1024, 1), head_dim, itemsize, windowed)
        held = (tiles.queries + 2 * tiles.stages * tiles.keys) * next_power_of_two(head_dim) * itemsize
        assert held <= max(99, kibibytes) * 1024, (head_dim, kibibytes, itemsize, windowed)


@pytest.mark.parametrize(
    ("dtype", "capability", "dim"),
    [*FEW_PROJECTIONS, *exhaustive(*(each for each in PROJECTIONS if each not in FEW_PROJECTIONS))],
)
def test_projection_compiles(dtype: str, capability: int, dim: int) -> None:
    code = compiled(projection_source(capability, dim, dtype), capability)
    assert code.spills == 0
    assert code.shared <= LIMITS[capability].shared_memory


@pytest.mark.exhaustive
@pytest.mark.parametrize(("capability", "dtype"), product((80, 90, 100), ("bf16", "fp16", "fp32")))
def test_kernels_of_layers_compile_without_spills(capability: int, dtype: str) -> None:
    tried = 0
    for variant in layer_variants(dtype):
        code = compiled(variant.source, capability)
        assert code.spills == 0, variant.name
        assert code.shared <= LIMITS[capability].shared_memory, variant.name
        tried += 1
    assert tried >= 30
