"""The Triton kernels: interpreted on a CPU against plain torch, and compiled ahead of time for GPUs."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import pytest
import torch

from maxsimd.bench.gpu.ahead_of_time import compiled
from maxsimd.bench.gpu.attention_compiled import AttentionLaunch
from maxsimd.bench.gpu.bounds import H100, most_tflops, resident_programs
from maxsimd.bench.gpu.compiled import projection_source
from maxsimd.bench.gpu.maxsim_compiled import LIMITS
from maxsimd.engine.execution.attention.base import CaptureSize
from maxsimd.engine.execution.attention.triton_kernel import TritonBackend, TritonMetadata
from maxsimd.engine.execution.layout import Group, Layout
from maxsimd.engine.ops.qkv import QKV
from maxsimd.engine.ops.triton.launch import Limits, next_power_of_two
from tests.unit.engine.ops.interpreted import run_interpreted
from tests.unit.engine.ops.kernel_checks import CHECKS, check_maxsim_of_all_sizes

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.exhaustive if check is check_maxsim_of_all_sizes else ())
        for check in CHECKS
    ],
)
def test_a_kernel_equals_plain_torch_when_interpreted(check: Callable[[str], None]) -> None:
    run_interpreted(check, "cpu")


# Compiling, for every generation that has a table of its own: a few kernels, and all before a release.

# All that a sequence can be: with both causal variants a prefix, which a program passes over as well.
ALL_ATTENTION = [(True, True, True), (True, False, True), (False, True, False)]
FEW_ATTENTION = [("bf16", 128, 80), ("bf16", 64, 90), ("bf16", 128, 100), ("fp32", 128, 80)]
FEW_PROJECTIONS = [("bf16", 90, 128), ("fp32", 80, 1024), ("fp16", 80, 128)]


def exhaustive_unless(few: bool) -> Any:
    return () if few else pytest.mark.exhaustive


ATTENTION_VARIANTS = [
    pytest.param(
        dtype,
        head_dim,
        capability,
        *variant,
        marks=exhaustive_unless(
            (dtype, head_dim, capability) in FEW_ATTENTION and variant == ALL_ATTENTION[0]
        ),
    )
    for dtype, heads in (("bf16", (64, 80, 128, 256)), ("fp16", (64,)), ("fp32", (64, 128, 256)))
    for head_dim in heads
    for capability in LIMITS
    for variant in ALL_ATTENTION
]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "causal", "windowed", "prefixed"), ATTENTION_VARIANTS
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
    """Blocks of 64 queries with several programs at a time, so that one multiplies while another computes."""
    code = compiled(AttentionLaunch(90, head_dim, causal=causal).source, 90)
    assert len(code.main_loop) <= most_instructions
    assert resident_programs(code, H100) >= programs
    assert most_tflops(code, H100) >= least_tflops


CARRIED = [
    pytest.param(head_dim, causal, prefixed, tiles, marks=exhaustive_unless(index == 0))
    for index, (head_dim, causal, prefixed, tiles) in enumerate(
        [
            (64, False, False, (64, 64, 4, 3, 200, True)),
            (64, False, True, (64, 64, 4, 3, 200, True)),
            (64, False, False, (128, 64, 8, 3, 200, True)),
            (64, False, True, (128, 64, 8, 3, 200, True)),
            (128, True, False, (64, 32, 4, 3, 200, True)),
            (128, True, True, (64, 32, 4, 3, 200, True)),
        ]
    )
]


@pytest.mark.parametrize(("head_dim", "causal", "prefixed", "tiles"), CARRIED)
def test_carried_attention_multiplies_the_next_keys_during_softmax(
    head_dim: int, causal: bool, prefixed: bool, tiles: tuple[Any, ...]
) -> None:
    from maxsimd.engine.ops.triton.attention import Tiles

    launch = AttentionLaunch(90, head_dim, causal=causal, prefixed=prefixed, tiles=Tiles(*tiles))
    code = compiled(launch.source, 90)
    assert code.spills == 0
    assert code.main_loop.powers_beside_products >= code.main_loop.powers / 2


def test_attention_has_tiles_for_every_head_and_device() -> None:
    from maxsimd.engine.ops.triton import attention

    for head_dim, kibibytes, itemsize, windowed in product(
        (24, 32, 64, 80, 128, 256), (0, 48, 99, 163, 227), (2, 4), (False, True)
    ):
        tiles = attention.tiles_for(Limits(0, kibibytes * 1024, 1), head_dim, itemsize, windowed, 0)
        held = (tiles.queries + 2 * tiles.stages * tiles.keys) * next_power_of_two(head_dim) * itemsize
        assert held <= max(99, kibibytes) * 1024, (head_dim, kibibytes, itemsize, windowed)


def test_attention_has_tiles_of_their_own_for_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's tiles are chosen by the keys that its queries see on average, those of a CUDA graph by the
    length of the sequences that fill it."""
    from maxsimd.engine.ops.triton import attention

    short, long = attention.Tiles(16, 16, 4, 1), attention.Tiles(32, 16, 4, 1, carried=True)
    monkeypatch.setitem(attention._TILES, 99, ({64: short}, {64: short}))
    monkeypatch.setitem(attention._LONG_TILES, 99, {64: long})

    def step(lengths: list[int]) -> TritonMetadata:
        starts = [0, *accumulate(lengths)]
        groups = tuple(Group(start, 1, n, (n,)) for start, n in zip(starts, lengths, strict=False))
        return TritonBackend().prepare(Layout(False, groups), torch.device("cpu"))

    qkv = QKV(*torch.zeros(3, 1, 1400, 64, dtype=torch.bfloat16), 1.0)
    for lengths, window, expected in (
        ([511], None, short),
        ([512], None, long),
        ([512], 128, short),
        ([10] * 50 + [900], None, long),
        ([500, 500], None, short),
    ):
        tiles, blocks = step(lengths).whole_tiled(replace(qkv, window=window))
        assert tiles == expected
        assert len(blocks) == sum(-(-length // expected.queries) for length in lengths)
    tried = step([40])
    assert tried.whole_tiled(qkv)[0] == short
    for size, expected in ((CaptureSize(1024, 32, 1024), short), (CaptureSize(1024, 2, 1024), long)):
        static = TritonBackend().prepare_for_capture(tried, size)
        tensors = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in static.shapes.items()}
        assert static.over(tensors).whole_tiled(qkv)[0] == expected
        assert [*static.contents(tried.layout)] == [f"blocks of {expected.queries}"]


@pytest.mark.parametrize(
    ("dtype", "capability", "dim"),
    [
        pytest.param(*each, marks=exhaustive_unless(each in FEW_PROJECTIONS))
        for each in product(("fp32", "bf16", "fp16"), (80, 90, 100), (128, 1024))
    ],
)
def test_projection_compiles(dtype: str, capability: int, dim: int) -> None:
    code = compiled(projection_source(capability, dim, dtype), capability)
    assert code.spills == 0
    assert code.shared <= LIMITS[capability].shared_memory
