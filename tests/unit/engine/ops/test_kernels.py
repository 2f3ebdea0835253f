"""The compiled kernels for linear layers, attention and towers against plain torch, on random input."""

import itertools
import mmap
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maxsimd.engine.execution import linear as layers
from maxsimd.engine.execution import weights as towers
from maxsimd.engine.execution.attention.backend import OneByOneBackend
from maxsimd.engine.execution.attention.cpu import CompiledBackend
from maxsimd.engine.execution.devices import one_thread
from maxsimd.engine.execution.layout import Layout
from maxsimd.engine.execution.weights import TOWER_ATTENTION, PatchProduct, attend_within_pictures
from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops import elementwise
from maxsimd.engine.ops.cpu import linear as products
from maxsimd.engine.ops.cpu.blocks import KINDS, BlockTensor
from maxsimd.engine.ops.cpu.library import may_use
from maxsimd.engine.ops.cpu.maxsim import first_not_finite
from maxsimd.engine.ops.cpu.memory import empty_in_large_pages
from maxsimd.engine.ops.qkv import QKV
from tests.checkpoints.gguf_models import in_blocks
from tests.unit.engine.execution.test_packed import CPU, full, laid_out
from tests.unit.engine.ops import kernel_checks
from tests.unit.engine.ops.kernel_checks import numbers

pytestmark = pytest.mark.usefixtures("two_threads")
Pack, Shape = Callable[[torch.Tensor], products.Weights], tuple[int, int, int]
needs_kernels = pytest.mark.skipif(not kernels.is_available(), reason="this processor cannot run the kernels")


def test_the_kernels_are_built_where_they_can_run() -> None:
    cpu = Path("/proc/cpuinfo")
    capable = cpu.exists() and {"avx512_bf16", "avx512_vnni"} <= set(cpu.read_text(encoding="utf-8").split())
    if not (capable and may_use("avx512_bf16")) or shutil.which("g++") is None:
        pytest.skip("there is no compiler, or the processor lacks AVX-512, or may not use it")
    assert kernels.is_available()


def exact_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x.double())


@contextmanager
def amx(wanted: bool) -> Iterator[None]:
    """Products of bfloat16 and int8 in AMX tiles, where the processor has them, or never."""
    products.use_amx(wanted)
    try:
        yield
    finally:
        products.use_amx(True)


def through_gelu(x: torch.Tensor, pack: Pack) -> torch.Tensor:
    """GELU of numbers [n], behind a layer that leaves them as they are."""
    wide = torch.stack([x, torch.zeros_like(x)], dim=1)
    return products.Product(pack(torch.tensor([[1.0, 0.0]])), None).linear(wide, True)[:, 0]


SCALES = torch.cat([torch.linspace(-14, 14, 56001), torch.tensor([-3e38, -100.0, 0.0, 1e-30, 100.0, 1e38])])


@needs_kernels
def test_gelu_equals_the_exact_form_on_every_scale() -> None:
    for pack, atol, rtol in ((products.pack_float32, 2e-7, 2e-7), (products.pack_bfloat16, 1.1e-5, 2**-8)):
        dtype = pack(torch.zeros(1, 1)).dtype
        x = SCALES.to(dtype)
        torch.testing.assert_close(through_gelu(x, pack).double(), exact_gelu(x), atol=atol, rtol=rtol)
        assert through_gelu(torch.tensor([float("nan")], dtype=dtype), pack).isnan().all()
    assert through_gelu(torch.tensor(WRONG).bfloat16(), products.pack_int8).isnan().all()


@needs_kernels
def test_silu_is_within_half_a_unit_of_bfloat16() -> None:
    x = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)
    x, gates = x[x.abs() < 1e38, None], torch.tensor([1.0] * 16 + [0.0] * 16)
    out = products.Product(products.pack_bfloat16(gates[:, None]), 1 - gates).gated(x, "silu")[:, :1]
    expected = torch.nn.functional.silu(x.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-37, rtol=1.03 * 2**-8)


# rows, inputs, columns: of one tile, of several, with edges, with few rows and with many columns
SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 140), st.integers(1, 130))
# With so many inputs that they are multiplied in chunks.
DEEP_SHAPES = SHAPES | st.tuples(st.integers(1, 300), st.sampled_from([1200, 2560]), st.integers(1, 130))
# Whole tiles and such as leave something over, and rows that lie at distances of 2 KiB.
LAYERS = [(64, 96), (384, 160), (130, 33), (45, 7), (1100, 64), (1024, 40)]


def random_layer(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    rows, inputs, columns = shape
    random = torch.Generator().manual_seed(rows * inputs + columns)
    x = torch.randn(rows, inputs, generator=random).to(dtype)
    weight = (torch.randn(columns, inputs, generator=random) * inputs**-0.5).to(dtype)
    return x, weight, torch.randn(columns, generator=random)


@needs_kernels
@pytest.mark.parametrize(("pack", "rtol"), [(products.pack_float32, 2e-6), (products.pack_bfloat16, 2**-7)])
@given(DEEP_SHAPES, st.booleans(), st.booleans(), st.booleans())
@settings(deadline=None)
def test_linear_is_exact(pack: Pack, rtol: float, shape: Shape, bias: bool, gelu: bool, tiles: bool) -> None:
    x, weight, all_biases = random_layer(shape, pack(torch.zeros(1, 1)).dtype)
    biases = all_biases if bias else None
    expected = x.double() @ weight.double().T
    expected = expected if biases is None else expected + biases
    expected = exact_gelu(expected) if gelu else expected
    with amx(tiles):
        ours = products.Product(pack(weight), biases).linear(x, gelu)
    allowed = torch.full_like(expected, 1e-3)
    if pack is products.pack_float32:
        # Each addition is rounded by 2**-24 of its sum, which is at most that of all magnitudes. GELU's slope
        # is at most 1.13.
        magnitudes = x.double().abs() @ weight.double().abs().T + (0 if biases is None else biases.abs())
        allowed = 1.13 * (shape[1] + 1) * 2**-24 * magnitudes
    assert ((ours.double() - expected).abs() <= allowed + rtol * expected.abs()).all()


@needs_kernels
@given(DEEP_SHAPES, st.booleans(), st.booleans())
@settings(deadline=None)
def test_int8_linear_equals_its_definition(shape: Shape, bias: bool, gelu: bool) -> None:
    x, weight, all_biases = random_layer(shape)
    x = torch.nn.functional.pad(x, (0, shape[1] % 2)).bfloat16()[:, : shape[1]]
    x[0], weight[-1] = 0, 0
    biases = all_biases if bias else None
    row_sizes, column_scales = x.float().abs().amax(dim=1, keepdim=True), weight.abs().amax(1, True) / 127
    # In double precision, so that what lies halfway between two steps goes the same way here.
    steps = torch.where(row_sizes > 0, torch.tensor(127.0) / row_sizes, 0).double()
    rounded = (x.double() * steps).round().float() * (row_sizes / 127)
    expected = rounded @ ((weight / column_scales.clamp(min=1e-30)).round() * column_scales).T
    expected = expected if biases is None else expected + biases
    expected = exact_gelu(expected).float() if gelu else expected
    layer = products.Product(products.pack_int8(weight), biases)
    with amx(False):
        by_vectors = layer.linear(x, gelu)
    ours = layer.linear(x, gelu)
    assert torch.equal(ours, by_vectors)  # sums of integers are the same in AMX tiles
    torch.testing.assert_close(ours.float(), expected, atol=1e-3, rtol=2**-7)


@needs_kernels
@given(SHAPES, st.booleans(), st.sampled_from([products.pack_float32, products.pack_bfloat16]))
@settings(deadline=None)
def test_a_fused_layer_norm_equals_the_plain_one(shape: Shape, strided: bool, pack: Pack) -> None:
    rows, inputs, columns = shape
    columns += 1  # of one column, nothing is left but noise
    dtype = pack(torch.zeros(1, 1)).dtype
    x, weight, bias = random_layer((rows, inputs, columns), dtype)
    random = torch.Generator().manual_seed(rows)
    scale, shift = torch.randn(2, columns, generator=random)
    residual = torch.randn(rows, columns + 4 * strided, generator=random).to(dtype)[:, :columns]
    total = torch.nn.functional.linear(x.float(), weight.float(), bias).to(dtype).double() + residual.double()
    expected = torch.nn.functional.layer_norm(total, (columns,), scale.double(), shift.double(), 1e-5)
    layer, norm = products.Product(pack(weight), bias), products.Norm(scale, shift, 1e-5)
    ours = layer.linear_norm(x, residual, norm).double()
    # The norm of a row whose columns lie close together makes much of their last bits.
    spread = total.std(dim=1, correction=0, keepdim=True).clamp(max=1)
    step = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(ours * spread, expected * spread, atol=step, rtol=step)


@needs_kernels
@pytest.mark.parametrize(
    ("pack", "atol", "rtol"), [(products.pack_float32, 2e-6, 2e-6), (products.pack_bfloat16, 1e-3, 2**-7)]
)
@given(SHAPES, st.booleans(), st.sampled_from(elementwise.ACTIVATIONS), st.booleans())
@settings(deadline=None)
def test_gates_and_sums_in_a_layer_equal_the_plain_ones(
    pack: Pack, atol: float, rtol: float, shape: Shape, bias: bool, gate: elementwise.Activation, tiles: bool
) -> None:
    rows, inputs, columns = shape
    columns = 32 * -(-columns // 32)
    x, weight, biases = random_layer((rows, inputs, columns), pack(torch.zeros(1, 1)).dtype)
    order = products.gated_order(columns // 2)
    wide = x.double() @ weight.double().T + (biases if bias else 0)
    gates, others = wide.chunk(2, dim=-1)
    beside = torch.randn(rows, columns + 4, generator=torch.Generator().manual_seed(rows)).to(x.dtype)[:, 4:]
    with amx(tiles):
        layer = products.Product(pack(weight[order]), biases[order] if bias else None)
        gated = layer.gated(x, gate)
        alone = layer.gated(x[rows // 2 : rows // 2 + 1], gate)
        added = products.Product(pack(weight), biases if bias else None).added(x, beside)
    expected = elementwise.activated_reference(gates, gate) * others
    torch.testing.assert_close(gated.double(), expected, atol=4 * atol, rtol=4 * rtol)
    torch.testing.assert_close(added.double(), wide + beside, atol=2 * atol, rtol=2 * rtol)
    assert torch.equal(alone[0], gated[rows // 2])


@needs_kernels
@given(
    st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 70)), min_size=1, max_size=3),
    st.integers(1, 3), st.integers(1, 130), st.booleans(),
)  # fmt: skip
@settings(deadline=None)
def test_layers_in_blocks_have_the_bits_of_expanded_ones(
    parts: list[tuple[str, int]], spans: int, rows: int, tiles: bool
) -> None:
    random, kept, numbers = torch.Generator().manual_seed(rows), [], []
    for kind, count in parts:
        stored = in_blocks(torch.randn(count, 256 * spans, generator=random).numpy(), Kind[kind])
        kept.append(BlockTensor.of(kind, torch.from_numpy(stored.view("uint8"))))
        numbers.append(torch.from_numpy(dequantize(stored, Kind[kind]).astype("float32")))
    blocks, plain = torch.cat(kept), torch.cat(numbers)
    assert torch.equal(blocks.numbers(), plain)
    order = torch.randint(len(plain), (len(plain) // 32 * 32 + 32,), generator=random)
    x = torch.randn(rows, 256 * spans + 8, generator=random).bfloat16()[:, 8:]
    bias, beside = torch.randn(len(plain)), torch.randn(rows, len(plain)).bfloat16()
    norm = products.Norm(torch.randn(len(plain)), torch.randn(len(plain)), 1e-12)

    def results(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
        layer = products.Product(products.pack_bfloat16(matrix), bias)
        yield layer.linear(x, gelu=True)
        yield products.Product(layer.weights, None).added(x, beside)
        yield layer.linear_norm(x, beside, norm)
        yield products.Product(products.pack_bfloat16(matrix[order]), None).gated(x, "silu")
        yield torch.nn.functional.linear(x.float(), matrix)

    with amx(tiles):
        assert all(map(torch.equal, results(blocks), results(plain)))


@needs_kernels
def test_nothing_changes_or_misreads_weights_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = BlockTensor.of("Q8_0", torch.ones(4, 34, dtype=torch.uint8))
    numbers, expanded = BlockTensor.numbers, list[int]()
    monkeypatch.setattr("maxsimd.engine.ops.cpu.blocks._AT_ONCE", 64)
    monkeypatch.setattr(BlockTensor, "numbers", lambda part: (expanded.append(len(part)), numbers(part))[1])
    x, bias = torch.randn(1, 3, 32), torch.randn(4)
    with torch.inference_mode():
        exact = torch.nn.functional.linear(x, numbers(matrix), bias)
        torch.testing.assert_close(torch.nn.functional.linear(x, matrix, bias), exact)
    assert expanded == [2, 2], "no more than a part at a time"
    for change in (lambda: matrix.mul_(2), lambda: matrix.__setitem__(0, 1), matrix.data_ptr):
        with pytest.raises(RuntimeError, match="in blocks"):
            change()
    assert matrix.is_finite()
    matrix.storages[0][3, :2] = torch.tensor([0, 0x7C])  # infinity in float16
    assert not matrix.is_finite()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no large pages")
def test_tensors_in_large_pages_lie_apart_and_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    mappings, new = weakref.WeakSet[mmap.mmap](), mmap.mmap
    noted = lambda *given, **more: mappings.add(made := new(*given, **more)) or made  # noqa: E731
    monkeypatch.setattr(mmap, "mmap", noted)
    tensors = [empty_in_large_pages(shape, torch.uint8) for shape in ((65 << 20,), (5, 3), (7, 11), (0, 4))]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor[:7] = number
    assert ([each[:7].unique().tolist() for each in tensors], len(mappings)) == ([[0], [1], [2], []], 1)
    tensors[0] = tensors[1]
    assert len(mappings) == 1
    tensors.clear()
    del tensor
    assert len(mappings) == 0
    monkeypatch.setattr(mmap, "mmap", Mock(side_effect=OSError("too many mappings")))
    assert empty_in_large_pages((5, 3), torch.float32).shape == (5, 3)


@needs_kernels
def test_shapes_that_do_not_fit_are_refused() -> None:
    x, layer = torch.ones(5, 8), products.Product(products.pack_float32(torch.ones(16, 8)), None)
    with pytest.raises(ValueError, match="multiple of 32"):
        layer.gated(x, "silu")
    with pytest.raises(ValueError, match="cannot be added"):
        layer.added(x, torch.ones(1, 16))
    norm = products.Norm(torch.ones(16).bfloat16(), torch.ones(16), 1e-5)
    with pytest.raises(ValueError, match="float32"):
        layer.linear_norm(x, torch.ones(5, 16), norm)
    with pytest.raises(ValueError, match="cosines"):
        elementwise.norm_rotary_(torch.ones(4, 3, 16), torch.ones(1, 16), torch.ones(1, 16), (1, 1), None)
    assert products.gated_order(32).tolist() == [*range(16), *range(32, 48), *range(16, 32), *range(48, 64)]
    with pytest.raises(ValueError, match="20 columns"):
        products.gated_order(20)


@needs_kernels
@pytest.mark.parametrize("check", [kernel_checks.check_norm, kernel_checks.check_norm_rotary])
def test_norms_and_rotations_equal_plain_torch(check: Callable[[str], None]) -> None:
    check("cpu")


@needs_kernels
def test_rows_are_normed_and_turned_to_the_same_bits_alone() -> None:
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 100, generator=random).bfloat16(), torch.randn(100, generator=random)
    normed, alone = (elementwise.norm(each, weight, None, 1e-6, is_centered=False) for each in (x, x[4:5]))
    assert torch.equal(normed[4:5], alone)
    qkv, angles = torch.randn(9, 6, 64, generator=random), torch.randn(2, 9, 64, generator=random)
    alone = qkv[4:5].clone()
    elementwise.norm_rotary_(qkv, *angles, (4, 1), None)
    elementwise.norm_rotary_(alone, *angles[:, 4:5], (4, 1), None)
    assert torch.equal(qkv[4:5], alone)


@needs_kernels
def test_a_compiled_layer_takes_any_shape_and_stride() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(48, 20).bfloat16()
    layer = layers.CompiledLinear(plain, False, products.pack_bfloat16)
    wide = torch.randn(2, 5, 96).bfloat16()
    for x in (wide[..., :48], wide[..., 48:], wide[..., ::2], wide[0, 0, :48], wide[:, :0, :48]):
        torch.testing.assert_close(layer(x), plain(x), atol=1e-2, rtol=1e-2)


OURS, EXACT = CompiledBackend(), OneByOneBackend()

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
DTYPES = st.sampled_from(list(TOLERANCE))
HEAD_DIMS = st.sampled_from([8, 16, 24, 32, 80, 128])  # also such as the kernel does not take as they are


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float(), exact.float(), atol=tolerance, rtol=tolerance)


@needs_kernels
@given(
    kernel_checks.whole_sequences(HEAD_DIMS, DTYPES, causal_ends=True)
    | kernel_checks.chunks(HEAD_DIMS, DTYPES)
    | kernel_checks.behind_prefixes(HEAD_DIMS, DTYPES)
)
@settings(deadline=None, max_examples=250)
def test_attention_equals_attention_one_by_one(problem: kernel_checks.Attention) -> None:
    exact = problem.exactly()
    close(problem.by(OURS), exact)
    if problem.layout.groups:
        first = problem.layout.whole_sequences[:, 0].tolist()
        close(OURS.first_rows(problem.qkv, OURS.prepare(problem.layout, CPU))[first], exact[first])


@needs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_to_long_sequences_equals_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = laid_out([700, 33], backend=OURS)
    q, k, v = ((torch.randn(2, 733, 64) * 3).to(dtype) for _ in range(3))
    ours = full(OURS, QKV(q, k, v, 0.125), batch.layout)
    exact = full(EXACT, QKV(q.double(), k.double(), v.double(), 0.125), batch.layout)
    # Such wide heads make much of the last bits of products, with torch as with us.
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)


# The same bits, whatever is computed beside a row or a sequence, and on however many threads


@needs_kernels
@pytest.mark.parametrize("ending", ["plain", "gelu", "norm"])
@pytest.mark.parametrize(("inputs", "columns"), LAYERS)
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("pack", [products.pack_float32, products.pack_bfloat16, products.pack_int8])
def test_rows_keep_bits_among_others(pack: Pack, tiles: bool, inputs: int, columns: int, ending: str) -> None:
    x, weight, bias = random_layer((700, inputs, columns), pack(torch.zeros(1, 1)).dtype)
    product = products.Product(pack(weight), bias)
    norm = products.Norm(torch.randn(columns), torch.randn(columns), 1e-12)

    def layer(rows: torch.Tensor) -> torch.Tensor:
        if ending == "norm":
            return product.linear_norm(rows, rows.repeat(1, columns)[:, :columns], norm)
        return product.linear(rows, gelu=ending == "gelu")

    with amx(tiles):
        everything = layer(x)
        for count in (1, 2, 7, 12, 13, 16, 17, 31, 33, 48, 65, 200, 511):
            assert torch.equal(layer(x[:count]), everything[:count]), count
        for number, count in itertools.product((1, 3), (1, 5, 64, 700)):
            torch.set_num_threads(number)
            assert torch.equal(layer(x[:count]), everything[:count]), (number, count)


@needs_kernels
@given(
    st.lists(st.integers(1, 80), min_size=2, max_size=6), st.sampled_from([(1, 1), (2, 1), (1, 3)]),
    st.sampled_from([16, 24, 64]), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(),
    st.none() | st.integers(2, 30),
)  # fmt: skip
@settings(deadline=None)
def test_a_sequence_attends_to_the_same_bits_in_a_crowd(
    lengths: list[int], heads: tuple[int, int], head_dim: int, dtype: Any, causal: bool, window: int | None
) -> None:
    def side_by_side(lengths: list[int]) -> Layout:
        """Sequences end to end, the last key of each longer one unseen unless it is causal."""
        seen = [length if causal or length < 3 else length - 1 for length in lengths]
        return laid_out(lengths, seen, backend=OURS, causal=causal).layout

    kv_heads, repeats = heads
    counts = (kv_heads * repeats, kv_heads, kv_heads)
    q, k, v = (kernel_checks.random_heads(n, sum(lengths), head_dim, dtype, i) for i, n in enumerate(counts))
    qkv = QKV(q, k, v, 0.2, window)
    everything = full(OURS, qkv, side_by_side(lengths))
    with one_thread():
        assert torch.equal(full(OURS, qkv, side_by_side(lengths)), everything)
    for first, length in zip(itertools.accumulate([0, *lengths]), lengths, strict=False):
        rows = slice(first, first + length)
        assert torch.equal(full(OURS, qkv.of_rows(rows), side_by_side([length])), everything[rows])


FINITE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WRONG = [float("nan"), -float("nan"), float("inf"), -float("inf")]


@needs_kernels
@pytest.mark.fast
@pytest.mark.parametrize("dtype", FINITE_DTYPES)
def test_the_first_with_a_wrong_number_is_found(dtype: torch.dtype) -> None:
    greatest = [torch.tensor([1, -1] * 48 + [1]).to(kind) * torch.finfo(kind).max for kind in FINITE_DTYPES]
    assert first_not_finite(greatest, [torch.inf] * 3) is first_not_finite([], []) is None
    cases = [*itertools.product(WRONG, (3.0, torch.inf)), (3.0, 3.0), (-4.0, 3.0)]
    for (wrong, limit), length in itertools.product(cases, (1, 15, 16, 17, 31, 32, 33, 64, 95)):
        for position in range(length):
            array = torch.full((length,), -2.98, dtype=dtype)
            array[position] = wrong
            assert first_not_finite([*greatest, array] * 2, [torch.inf, torch.inf, torch.inf, limit] * 2) == 3


TOWER_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@needs_kernels
@settings(deadline=None, max_examples=60)
@given(
    pictures=st.integers(1, 4), heads=st.integers(1, 3), patches=st.integers(1, 70),
    dims=st.sampled_from([8, 16, 24, 64, 72, 80]), dtype=st.sampled_from([*TOWER_TOLERANCES]),
    scaling=st.sampled_from([None, 0.1]), are_rows_apart=st.booleans(),
)  # fmt: skip
def test_attention_of_towers_equals_torch(
    pictures: int, heads: int, patches: int, dims: int, dtype: torch.dtype, scaling: float | None,
    are_rows_apart: bool,
) -> None:  # fmt: skip
    # As towers make them: views of one product, or tensors by themselves.
    if are_rows_apart:
        product = numbers(pictures, patches, 3, heads, dims, dtype=dtype)
        query, key, value = product.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        query, key, value = (numbers(pictures, heads, patches, dims, dtype=dtype) * i for i in (1, 2, 3))
    given = (query, key, value)
    made, weights = attend_within_pictures(nn.Identity(), *given, None, scaling=scaling, is_causal=False)
    expected = nn.functional.scaled_dot_product_attention(*(each.float() for each in given), scale=scaling)
    assert (weights, made.shape) == (None, (pictures, patches, heads, dims))
    tolerance = TOWER_TOLERANCES[dtype] * float(value.abs().max())
    torch.testing.assert_close(made.float(), expected.transpose(1, 2), atol=tolerance, rtol=0)


@needs_kernels
@pytest.mark.parametrize("what", ["mask", "causal"])
def test_what_not_all_patches_see_goes_to_torch(what: str) -> None:
    query, key, value = (numbers(2, 2, 9, 16) + i for i in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    options: dict[str, Any] = {"is_causal": True} if what == "causal" else {}
    module = SimpleNamespace(is_causal=False, num_key_value_groups=1)
    made, _ = attend_within_pictures(module, query, key, value, mask if what == "mask" else None, **options)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(made, expected.transpose(1, 2))


@needs_kernels
@settings(deadline=None, max_examples=40)
@given(
    sides=st.lists(st.integers(1, 4), min_size=2, max_size=3), bias=st.booleans(),
    extra=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)  # fmt: skip
def test_a_product_of_patches_equals_the_convolution(sides: list[int], extra: list[int], bias: bool) -> None:
    kind = nn.Conv2d if len(sides) == 2 else nn.Conv3d
    convolution: Any = kind(3, 5, tuple(sides), stride=tuple(sides), bias=bias)
    x = numbers(2, 3, *[side + more for side, more in zip(sides, extra, strict=False)])
    with torch.inference_mode():
        torch.testing.assert_close(PatchProduct(convolution)(x), convolution(x), atol=1e-5, rtol=1e-5)


class TinyAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


@needs_kernels
def test_only_convolutions_of_separate_patches_are_replaced() -> None:
    config = SimpleNamespace(_attn_implementation="sdpa")
    modules = {
        "patches": nn.Conv2d(3, 4, 2, stride=2), "overlapping": nn.Conv2d(3, 4, 3, stride=2),
        "padded": nn.Conv2d(3, 4, 2, stride=2, padding=1), "in_words": nn.Conv2d(3, 4, 1, padding="same"),
        "grouped": nn.Conv2d(4, 4, 2, stride=2, groups=2),
        "spread": nn.Conv2d(3, 4, 2, stride=2, dilation=2), "attention": TinyAttention(config),
    }  # fmt: skip
    tower = nn.ModuleDict(modules)
    with towers.tower_attention_restored([tower]):
        towers.use_tower_kernels([tower])
        assert config._attn_implementation == TOWER_ATTENTION
    assert config._attn_implementation == "sdpa"
    assert [name for name, module in tower.items() if isinstance(module, PatchProduct)] == ["patches"]
