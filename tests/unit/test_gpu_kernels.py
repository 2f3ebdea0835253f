"""The Triton kernels: interpreted on a CPU against plain torch, and compiled ahead of time for GPUs."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.bench.gpu.ahead_of_time import POINTERS, Source, compiled
from maxsimd.bench.gpu.compiled import projection_source
from maxsimd.bench.gpu.maxsim_compiled import LIMITS
from maxsimd.engine.ops import triton as triton_ops
from tests.unit.interpreted import run_interpreted
from tests.unit.kernel_checks import CHECKS

pytest.importorskip("triton")


@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_equals_plain_torch_when_interpreted(check: Callable[[str], None]) -> None:
    run_interpreted(check, "cpu")


# Compiling, for every generation that has a table of its own.

CAPABILITIES = [80, 90, 100]
# Shared memory that a program may have, of the smallest cards of a generation (86 and 89 among those of 8).
SHARED = {80: 99, 90: 227, 100: 227}
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def compile_for(
    kernel: Any, capability: int, types: Mapping[str, str], constants: Mapping[str, Any], **options: int
) -> None:
    assert compiled(Source(kernel, types, constants, options), capability).shared <= SHARED[capability] * 1024


# Kernels in float16 have tiles of the same shape as those in bfloat16: of them, `make test` compiles those of
# the first generation.
PRECISIONS_AND_CAPABILITIES = [
    pytest.param(
        dtype, capability, marks=pytest.mark.exhaustive if dtype == "fp16" and capability != 80 else ()
    )
    for dtype in ("fp32", "bf16", "fp16")
    for capability in CAPABILITIES
]


@pytest.fixture
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tables are asked for as a GPU of this capability would."""
    found: int = request.param
    monkeypatch.setattr("maxsimd.engine.ops.triton.attention.generation", lambda device: found // 10)
    return found


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize(("dtype", "capability"), PRECISIONS_AND_CAPABILITIES, indirect=["capability"])
def test_attention_compiles(dtype: str, head_dim: int, capability: int) -> None:
    from maxsimd.engine.ops.triton import attention

    tiles = attention.tiles_for(torch.device("cpu"), head_dim, BYTES[dtype])
    types = dict.fromkeys(("q", "k", "v", "prefix_k", "prefix_v", "out"), POINTERS[dtype])
    types |= {"blocks": "*i32", "scale": "fp32"}
    # All that a sequence can be, in one precision; the most that a program does, in every one.
    variants = [(True, True, True), (False, False, False), (False, True, False), (True, False, True)]
    for causal, windowed, prefixed in variants[: 4 if (dtype, head_dim) == ("bf16", 64) else 1]:
        constants = {"CAUSAL": causal, "WINDOWED": windowed, "PREFIXED": prefixed, "BLOCK_Q": tiles.queries}
        constants |= {"BLOCK_K": tiles.keys, "BLOCK_DIM": head_dim}
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        compile_for(attention.attention_kernel, capability, types, constants, **options)


@pytest.mark.parametrize("dim", [128, 1024])
@pytest.mark.parametrize(("dtype", "capability"), PRECISIONS_AND_CAPABILITIES)
def test_projection_compiles(dtype: str, dim: int, capability: int) -> None:
    code = compiled(projection_source(capability, dim, dtype), capability)
    assert code.shared <= LIMITS[capability].shared_memory


def test_documents_are_split_only_where_the_device_would_be_idle() -> None:
    from maxsimd.engine.ops.triton.maxsim_tiles import MAX_SPLIT_K, choose_split_k

    assert choose_split_k(132, programs=10_000, tiles_of_longest=200) == 1
    assert choose_split_k(132, programs=1, tiles_of_longest=7) == 1
    assert choose_split_k(132, programs=1, tiles_of_longest=50) == 12
    assert choose_split_k(132, programs=1, tiles_of_longest=5000) == MAX_SPLIT_K
    assert choose_split_k(132, programs=100, tiles_of_longest=64) == 3
    assert choose_split_k(132, programs=1, tiles_of_longest=0) == 1


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), min_size=1, max_size=8),
    st.sampled_from([16, 64]),
)
def test_blocks_cover_every_query_once_with_the_heaviest_first(
    sequences: list[tuple[int, int]], queries: int
) -> None:
    from maxsimd.engine.ops.triton.attention import blocks_of

    table, row = [], 0
    for length, earlier in sequences:
        table.append((row, length, 7 * row, length + earlier))
        row += length
    blocks = blocks_of(table, True, 5, queries)
    covered = sorted(row for first, count, *_ in blocks.tolist() for row in range(first, first + count))
    assert covered == list(range(row))
    of_row = {
        start + i: (start, keys - length + i) for start, length, _, keys in table for i in range(length)
    }
    for first, count, position, key, keys in blocks.tolist():
        start, among = of_row[first]
        assert (position, key) == (5 + among, 7 * start)
        assert count <= queries
        assert keys in {all_keys for begin, _, _, all_keys in table if begin == start}
    seen = [min(keys, position + count - 5) for _, count, position, _, keys in blocks.tolist()]
    assert seen == sorted(seen, reverse=True)


def test_kernels_run_on_a_cpu_only_when_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not triton_ops.runs_on(torch.device("cpu"))
    monkeypatch.setattr("maxsimd.engine.ops.triton.launch.INTERPRETED", True)
    assert triton_ops.runs_on(torch.device("cpu"))
