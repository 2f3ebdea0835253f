"""The compiled kernels against plain torch, on random ragged input."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertOutput

from maxsimd import kernels
from maxsimd.engine.packed import linear as layers
from maxsimd.engine.packed.carry import Carry
from maxsimd.engine.packed.compiled import (
    attend_after_prefix_compiled,
    attend_compiled,
    attend_first_rows_compiled,
    compiled_attention,
)
from maxsimd.engine.packed.grouped import (
    attend_first_rows,
    attend_groups_after_prefix,
    attend_one_by_one,
)
from maxsimd.engine.packed.layout import Layout, SharedGroup, lay_out
from maxsimd.kernels.linear import Norm, Weights, linear, linear_norm, pack_bfloat16, pack_int8
from maxsimd.pooling.maxsim import maxsim_compiled, maxsim_reference
from maxsimd.pooling.ragged import Ragged
from tests.unit.test_maxsim import problems
from tests.unit.test_packed import attention_problems, make_step

needs_kernels = pytest.mark.skipif(not kernels.is_available(), reason="this processor cannot run the kernels")


def test_the_kernels_are_built_where_they_can_run() -> None:
    cpu = Path("/proc/cpuinfo")
    capable = cpu.exists() and {"avx512_bf16", "avx512_vnni"} <= set(cpu.read_text(encoding="utf-8").split())
    if not capable or shutil.which("g++") is None:
        pytest.skip("there is no compiler, or the processor lacks AVX-512")
    assert kernels.is_available()


@needs_kernels
@given(problems())
def test_maxsim_in_float32_equals_the_reference(
    problem: tuple[Ragged, Ragged, list[tuple[int, int]]],
) -> None:
    torch.testing.assert_close(maxsim_compiled(*problem), maxsim_reference(*problem), atol=1e-5, rtol=1e-5)


@needs_kernels
@given(problems())
def test_maxsim_in_bfloat16_equals_the_reference_on_rounded_embeddings(
    problem: tuple[Ragged, Ragged, list[tuple[int, int]]],
) -> None:
    """Sums are float32 throughout, so nothing is lost but what rounding the embeddings loses."""
    queries, documents, pairs = problem
    queries = Ragged(queries.values.bfloat16(), queries.offsets)
    documents = Ragged(documents.values.bfloat16(), documents.offsets)
    scores, exact = (maxsim(queries, documents, pairs) for maxsim in (maxsim_compiled, maxsim_reference))
    # A dimension of an odd number goes another way, whose products are rounded to bfloat16.
    atol = 1e-4 if documents.values.shape[1] % 2 == 0 else 0.2
    torch.testing.assert_close(scores, exact, atol=atol, rtol=1e-3)


def exact_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x.double())


@needs_kernels
def test_gelu_equals_the_exact_form_on_every_scale() -> None:
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([-3e38, -100.0, 0.0, 100.0, 1e38])]).bfloat16()
    weights = pack_bfloat16(torch.tensor([[1.0, 0.0]]))
    out = linear(torch.stack([x, torch.zeros_like(x)], dim=1), weights, None, gelu=True)[:, 0]
    torch.testing.assert_close(out.double(), exact_gelu(x), atol=5e-5, rtol=2**-8)


# rows, inputs, columns: of one tile, of several, with edges, with few rows and with many columns
SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 70).map(lambda n: 2 * n), st.integers(1, 130))


@needs_kernels
@given(SHAPES, st.booleans(), st.booleans())
@settings(deadline=None)
def test_bfloat16_linear_equals_the_plain_one(shape: tuple[int, int, int], bias: bool, gelu: bool) -> None:
    rows, inputs, columns = shape
    random = torch.Generator().manual_seed(rows * inputs + columns)
    x = torch.randn(rows, inputs, generator=random).bfloat16()
    weight = (torch.randn(columns, inputs, generator=random) * inputs**-0.5).bfloat16()
    biases = torch.randn(columns, generator=random) if bias else None
    expected = torch.nn.functional.linear(x.float(), weight.float(), biases)
    expected = exact_gelu(expected).float() if gelu else expected
    ours = linear(x, pack_bfloat16(weight), biases, gelu).float()
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=2**-7)


@needs_kernels
@given(SHAPES, st.booleans(), st.booleans())
@settings(deadline=None)
def test_int8_linear_equals_its_definition(shape: tuple[int, int, int], bias: bool, gelu: bool) -> None:
    """Weights rounded by column, activations by row, both symmetrically to 127 steps."""
    rows, inputs, columns = shape
    inputs += inputs // 2 % 3 - 1 or 1  # also numbers that are not multiples of 4, or odd
    random = torch.Generator().manual_seed(rows * inputs + columns)
    x = torch.randn(rows, inputs + inputs % 2, generator=random).bfloat16()[:, :inputs]
    x[0] = 0
    weight = torch.randn(columns, inputs, generator=random) * inputs**-0.5
    weight[-1] = 0
    biases = torch.randn(columns, generator=random) if bias else None
    row_scales, column_scales = (y.float().abs().amax(dim=1, keepdim=True) / 127 for y in (x, weight))
    rounded = (x.float() / row_scales.clamp(min=1e-30)).round() * row_scales
    expected = rounded @ ((weight / column_scales.clamp(min=1e-30)).round() * column_scales).T
    expected = expected if biases is None else expected + biases
    expected = exact_gelu(expected).float() if gelu else expected
    ours = linear(x, pack_int8(weight), biases, gelu).float()
    # An activation that lies halfway between two steps may go to either.
    step = float((row_scales.max() * weight.abs().max()).item())
    torch.testing.assert_close(ours, expected, atol=2e-3 + step, rtol=2**-7)


@needs_kernels
@given(SHAPES, st.booleans())
@settings(deadline=None)
def test_a_fused_layer_norm_equals_the_plain_one(shape: tuple[int, int, int], strided: bool) -> None:
    rows, inputs, columns = shape
    random = torch.Generator().manual_seed(rows * inputs + columns)
    x = torch.randn(rows, inputs, generator=random).bfloat16()
    weight = (torch.randn(columns, inputs, generator=random) * inputs**-0.5).bfloat16()
    bias, scale, shift = torch.randn(3, columns, generator=random)
    residual = torch.randn(rows, columns + 4 * strided, generator=random).bfloat16()[:, :columns]
    total = torch.nn.functional.linear(x.float(), weight.float(), bias).bfloat16().float() + residual.float()
    expected = torch.nn.functional.layer_norm(total, (columns,), scale, shift, 1e-12)
    ours = linear_norm(x, residual, pack_bfloat16(weight), bias, Norm(scale, shift, 1e-12)).float()
    if columns > 1:  # of one column, nothing is left but noise
        torch.testing.assert_close(ours, expected, atol=6e-2, rtol=2**-6)


@needs_kernels
@pytest.mark.parametrize(("pack", "tolerance"), [(pack_bfloat16, 0.05), (pack_int8, 0.1)])
def test_the_halves_of_a_bert_layer_end_in_one_kernel(
    pack: Callable[[torch.Tensor], Weights], tolerance: float
) -> None:
    torch.manual_seed(0)
    output = BertOutput(BertConfig(hidden_size=64, intermediate_size=96)).bfloat16().eval()
    x, residual = torch.randn(1, 30, 96).bfloat16(), torch.randn(1, 30, 64).bfloat16()
    assert layers._is_output(output)
    fused = layers.CompiledOutput(output, pack)
    with torch.inference_mode():
        torch.testing.assert_close(fused(x, residual), output(x, residual), atol=tolerance, rtol=0.05)


def test_an_output_of_another_kind_is_left_alone() -> None:
    """The same parts, put together otherwise: normed before the sum, or without a sum."""

    class NormedOutput(BertOutput):
        def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
            return self.LayerNorm(self.dense(hidden_states)) + input_tensor

    class LonelyOutput(BertOutput):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.LayerNorm(self.dense(hidden_states))

    for kind in (NormedOutput, LonelyOutput):
        assert not layers._is_output(kind(BertConfig(hidden_size=16, intermediate_size=32)).eval())


@needs_kernels
def test_a_compiled_layer_takes_any_shape_and_stride() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(48, 20).bfloat16()
    layer = layers.CompiledLinear(plain, False, pack_bfloat16)
    wide = torch.randn(2, 5, 96).bfloat16()
    for x in (wide[..., :48], wide[..., 48:], wide[..., ::2], wide[0, 0, :48], wide[:, :0, :48]):
        torch.testing.assert_close(layer(x), plain(x), atol=1e-2, rtol=1e-2)


@needs_kernels
@given(attention_problems(), st.sampled_from([16, 32, 48, 80, 128]))
@settings(deadline=None)
def test_attention_equals_attention_one_by_one(
    problem: tuple[list[int], list[int], int, int, bool, int | None], head_dim: int
) -> None:
    lengths, attended, kv_heads, repeats, causal, window = problem
    step = make_step(lengths, attended)
    batch = lay_out(
        step, {}, causal=causal, arrangement=compiled_attention(False).arrangement, position_offset=0
    )
    random = torch.Generator().manual_seed(sum(lengths))
    q, k, v = (
        torch.randn(sum(lengths), heads, head_dim, generator=random).bfloat16().transpose(0, 1)
        for heads in (kv_heads * repeats, kv_heads, kv_heads)
    )
    ours = attend_compiled(q, k, v, batch.layout, head_dim**-0.5, window)
    exact = attend_one_by_one(q.float(), k.float(), v.float(), batch.layout, head_dim**-0.5, window)
    torch.testing.assert_close(ours.float(), exact, atol=2e-2, rtol=2e-2)
    if not causal:
        first = list(batch.cursor.starts)
        ours = attend_first_rows_compiled(q, k, v, batch.layout, head_dim**-0.5)
        exact = attend_first_rows(q.float(), k.float(), v.float(), batch.layout, head_dim**-0.5)
        torch.testing.assert_close(ours[first].float(), exact[first], atol=2e-2, rtol=2e-2)


@needs_kernels
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 1)), min_size=1, max_size=6),
    st.sampled_from([(2, 1), (1, 3)]),
    st.none() | st.integers(2, 20),
    st.sampled_from([16, 64]),
)
@settings(deadline=None)
def test_attention_behind_prefixes_equals_the_plain_one(
    chunks: list[tuple[int, int]], heads: tuple[int, int], window: int | None, head_dim: int
) -> None:
    kv_heads, repeats = heads
    random = torch.Generator().manual_seed(sum(length for length, _ in chunks))
    prefixes = [
        tuple(torch.randn(kv_heads, length, head_dim, generator=random).bfloat16() for _ in "kv")
        for length in (7, 20)
    ]
    carries = [Carry(), Carry()]
    rows = [sum(length for length, _ in chunks[:i]) for i in range(len(chunks) + 1)]
    shared = [
        SharedGroup(row, 1, length, carries[which])
        for row, (length, which) in zip(rows, chunks, strict=False)
    ]
    layout = Layout((), (), True, shared=tuple(shared))
    q, k, v = (
        torch.randn(n, rows[-1], head_dim, generator=random).bfloat16()
        for n in (kv_heads * repeats, kv_heads, kv_heads)
    )
    before = [prefixes[which] for _, which in chunks]
    ours = torch.empty(rows[-1], kv_heads * repeats, head_dim, dtype=torch.bfloat16)
    attend_after_prefix_compiled(q, k, v, layout, before, head_dim**-0.5, window, ours)
    exact = torch.empty(ours.shape)
    wide = [(keys.float(), values.float()) for keys, values in before]
    attend_groups_after_prefix(q.float(), k.float(), v.float(), layout, wide, head_dim**-0.5, window, exact)
    torch.testing.assert_close(ours.float(), exact, atol=2e-2, rtol=2e-2)


@needs_kernels
def test_attention_to_long_sequences_equals_the_plain_one() -> None:
    torch.manual_seed(0)
    batch = lay_out(
        make_step([700, 33]),
        {},
        causal=False,
        arrangement=compiled_attention(False).arrangement,
        position_offset=0,
    )
    q, k, v = (torch.randn(2, 733, 64).bfloat16() * 3 for _ in range(3))
    ours = attend_compiled(q, k, v, batch.layout, 0.125, None).float()
    exact = attend_one_by_one(q.float(), k.float(), v.float(), batch.layout, 0.125, None)
    torch.testing.assert_close(ours, exact, atol=4e-2, rtol=2e-2)


@needs_kernels
def test_what_the_kernel_does_not_know_goes_the_plain_way() -> None:
    torch.manual_seed(0)
    batch = lay_out(
        make_step([7, 3]),
        {},
        causal=False,
        arrangement=compiled_attention(False).arrangement,
        position_offset=0,
    )
    q, k, v = (torch.randn(2, 10, 24).bfloat16() for _ in range(3))
    ours = attend_compiled(q, k, v, batch.layout, 0.2, None).float()
    exact = attend_one_by_one(q.float(), k.float(), v.float(), batch.layout, 0.2, None)
    torch.testing.assert_close(ours, exact, atol=2e-2, rtol=2e-2)
