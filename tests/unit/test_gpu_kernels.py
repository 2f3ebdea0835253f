"""The Triton kernels: interpreted on a CPU against plain torch, and compiled ahead of time for GPUs."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
INDICES = ("query_starts", "query_stops", "document_starts", "document_stops")
INDICES += ("pair_queries", "pair_documents")
VARYING = {"longest_query", "split_k", "count", "prefix_keys", "window", "repeats", *INDICES}
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "i8": "*i8"}
Items = tuple[tuple[str, Any], ...]
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def compile_for(
    kernel: Any, capability: int, types: Mapping[str, str], constants: Mapping[str, Any], **options: int
) -> None:
    """Compiles to machine code; arguments that are neither typed nor constant are 32-bit integers.

    As in a launch, addresses, sizes and strides are multiples of 16, but for what differs from step to
    step."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
    }
    taken = {name: value for name, value in constants.items() if name in kernel.arg_names}
    shared = shared_memory(
        kernel, capability, *(tuple(sorted(given.items())) for given in (signature, taken, options))
    )
    assert shared <= SHARED[capability] * 1024


@functools.cache
def shared_memory(kernel: Any, capability: int, signature: Items, constants: Items, options: Items) -> int:
    """Compiles a kernel, once where it is the same for several precisions or lengths of queries. Returns how
    many bytes of shared memory a program of it takes."""
    import triton
    from triton.backends.compiler import GPUTarget

    types = dict(signature)
    even = [name for name, kind in types.items() if kind not in ("constexpr", "fp32") and name not in VARYING]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}
    in_order = {name: types[name] for name in kernel.arg_names}
    source = triton.compiler.ASTSource(
        kernel, signature=in_order, constexprs=dict(constants), attrs=attributes
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    assert "cubin" in compiled.asm
    return int(compiled.metadata.shared)


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
    for module in ("maxsim", "attention", "projection"):
        monkeypatch.setattr(f"maxsimd.engine.ops.triton.{module}.generation", lambda device: found // 10)
    return found


@pytest.mark.parametrize("query", [32, 1024])
@pytest.mark.parametrize(
    ("dtype", "capability"),
    [*PRECISIONS_AND_CAPABILITIES, *(("i8", capability) for capability in CAPABILITIES)],
    indirect=["capability"],
)
def test_maxsim_compiles(dtype: str, query: int, capability: int) -> None:
    from maxsimd.engine.ops.triton import maxsim

    tiles = maxsim.tiles_for(torch.device("cpu"), 128, BYTES.get(dtype, 2), query)
    types = {"queries": "*bf16" if dtype == "i8" else POINTERS[dtype], "documents": POINTERS[dtype]}
    types |= dict.fromkeys(("scales", "best_of_split", "scores"), "*fp32")
    types |= dict.fromkeys(INDICES, "*i32")
    constants = {"SCALED": dtype == "i8", "WHOLE": tiles.dim >= 128, "EMPTY": -1e9}
    constants |= {"BLOCK_Q": tiles.query, "BLOCK_D": tiles.document, "BLOCK_DIM": tiles.dim}
    for kernel in (maxsim.maxsim_kernel, maxsim.sum_kernel):
        compile_for(kernel, capability, types, constants, num_warps=tiles.warps)


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
@pytest.mark.parametrize(("dtype", "capability"), PRECISIONS_AND_CAPABILITIES, indirect=["capability"])
def test_projection_compiles(dtype: str, dim: int, capability: int) -> None:
    from maxsimd.engine.ops.triton import projection

    tiles = projection.tiles_for(torch.device("cpu"), dim, BYTES[dtype])
    types = {"hidden": POINTERS[dtype], "weight": POINTERS[dtype], "out": POINTERS[dtype]}
    types |= {"rows": "*i64", "bias": "*fp32", "epsilon": "fp32"}
    constants = {"BIASED": True, "NORMALIZED": True, "BLOCK_ROWS": tiles.rows, "BLOCK_HIDDEN": tiles.hidden}
    constants |= {"BLOCK_DIM": dim}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    compile_for(projection.projection_kernel, capability, types, constants, **options)


def test_documents_are_split_only_where_the_device_would_be_idle() -> None:
    from maxsimd.engine.ops.triton.maxsim import MAX_SPLIT_K, choose_split_k

    assert choose_split_k(132, programs=10_000, tiles_of_longest=2) == 1
    assert choose_split_k(132, programs=1, tiles_of_longest=50) == 50
    assert choose_split_k(132, programs=1, tiles_of_longest=500) == MAX_SPLIT_K
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
