"""Faster linear layers against the plain ones: by torch, and in int8 without AVX-512 BF16."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.execution import int8, linear
from maxsimd.engine.execution.self_check.samples import in_float32
from maxsimd.engine.ops.cpu import int8_linear, library
from maxsimd.engine.ops.cpu.int8_linear import Kernel
from maxsimd.engine.ops.cpu.linear import Norm

pytestmark = pytest.mark.usefixtures("two_threads")
RIGHT = [path for path in int8.candidates(True) if int8.is_right(path)]
each_path = pytest.mark.parametrize("path", RIGHT, ids=lambda path: f"{path.name}, {path.most}")
KERNELS = [kernel for kernel in int8_linear.KERNELS if kernel.is_available()]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.level)
# rows, inputs, columns: of one tile, of several, with edges, with few rows and with many columns
SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 140), st.integers(1, 70))


def layer(inputs: int, columns: int, most: int, bias: bool = True) -> int8.RoundedWeights:
    return int8.round_weights(torch.randn(columns, inputs), torch.randn(columns) if bias else None, most)


@pytest.mark.parametrize("most", [63, 127])
def test_the_plain_product_is_the_layer_but_for_rounding(most: int) -> None:
    torch.manual_seed(0)
    x, w, bias = torch.randn(50, 200), torch.randn(30, 200), torch.randn(30)
    found = int8.PlainProduct(int8.round_weights(w, bias, most)).linear(x, False)
    exact = x.double() @ w.double().T + bias.double()
    # Rounding takes at most half a step of each factor.
    steps = x.abs().amax(1, keepdim=True) / 254, w.abs().amax(1) / (2 * most)
    bound = steps[0] * w.abs().sum(1) + steps[1] * x.abs().sum(1, keepdim=True) + 200 * steps[0] * steps[1]
    assert ((found - exact).abs() <= bound * 1.001).all()
    assert ((found - exact).abs().mean() / exact.abs().mean()) < 0.03


@each_path
@given(SHAPES, st.booleans(), st.booleans())
@settings(deadline=None, max_examples=30)
def test_paths_equal_plain_ones(path: int8.Path, shape: tuple[int, int, int], bias: bool, gelu: bool) -> None:
    rows, inputs, columns = shape
    weights, x = layer(inputs, columns, path.most, bias), torch.randn(rows, inputs + 3)[:, :inputs]
    found, plain = (make(weights).linear(x, gelu) for make in (path.make, int8.PlainProduct))
    torch.testing.assert_close(found, plain, atol=2e-5, rtol=2e-5)
    residual, norm = torch.randn(rows, columns), Norm(torch.randn(columns), torch.randn(columns), 1e-5)
    found, plain = (make(weights).linear_norm(x, residual, norm) for make in (path.make, int8.PlainProduct))
    torch.testing.assert_close(found, plain, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("path", [int8.PLAIN, *RIGHT], ids=lambda path: f"{path.name}, {path.most}")
def test_strange_rows_stay_strange_and_harm_no_others(path: int8.Path) -> None:
    torch.manual_seed(0)
    weights, x = layer(70, 20, path.most), torch.randn(6, 70)
    x[1, 69], x[2, 3], x[3], x[4] = float("nan"), float("inf"), 0, 1e-40
    found = path.make(weights).linear(x, False)
    assert found[1:3].isnan().all()
    assert path.make(weights).linear(x, True)[1:3].isnan().all()
    assert weights.bias is not None
    assert torch.equal(found[3:5], weights.bias.expand(2, -1))
    torch.testing.assert_close(found[::5], int8.PlainProduct(weights).linear(x[::5], False))


@each_kernel
def test_the_gelu_of_a_kernel_is_the_exact_form_on_every_scale(kernel: Kernel) -> None:
    x = torch.cat([torch.linspace(-14, 14, 5601), torch.tensor([-3e38, -100.0, 0.0, 1e-20, 100.0, 1e38])])
    one = int8_linear.pack(kernel, torch.tensor([[1]], dtype=torch.int8), torch.tensor([1.0]), None)
    out = one.linear(x[:, None], True)
    # A row of one number is 127 times its scale.
    torch.testing.assert_close(out[:, 0].double(), torch.nn.functional.gelu(x.double()), atol=4e-7, rtol=4e-7)
    with pytest.raises(ValueError, match="cannot be added"):
        one.linear_norm(x[:, None], x[:1, None], Norm(torch.ones(1), torch.ones(1), 1e-5))


@each_path
@pytest.mark.parametrize("inputs", [1, 4, 7, 8, 12, 1024])
def test_the_largest_sums_of_every_sign_fit(path: int8.Path, inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.where(torch.randn(40, inputs) > 0, path.most, -path.most).to(torch.int8)
    rows = torch.cat([weight.sign(), -weight.sign(), torch.where(weight > 0, 1, -0.02)]).float()
    rounded = int8.RoundedWeights(weight, torch.ones(40), None)
    found, plain = (make(rounded).linear(rows, False) for make in (path.make, int8.PlainProduct))
    torch.testing.assert_close(found, plain, atol=0.0, rtol=1e-6)


class Saturating(int8.PlainProduct):
    """Adds two products at a time in 16 bits, as processors without VNNI do."""

    def scaled_sums(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self._weight.int()
        pairs = (rows.int()[:, None, :] * weight).unfold(2, 2, 2).sum(3).clamp(-(2**15), 2**15 - 1).sum(2)
        return (pairs - int8.ZERO * weight.sum(1)).float() * self._scales


def test_the_finest_path_that_is_right_is_taken() -> None:
    assert [int8.is_right(int8.Path("saturating", most, Saturating)) for most in (127, 63)] == [False, True]
    for wrong in (Saturating, Mock(side_effect=RuntimeError("no such operator"))):
        assert int8.choose([int8.Path("wrong", 127, wrong)]) == int8.PLAIN
    fine, coarse = int8.Path("fine", 127, int8.PlainProduct), int8.Path("coarse", 63, int8.PlainProduct)
    assert int8.choose([fine, coarse]).most == 127


@pytest.mark.parametrize(("in_float32", "warned"), [(1.0, True), (3.0, False)])
def test_where_int8_is_slower_than_float32_the_log_says_so(
    in_float32: float, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def took(runs: Mapping[str, object]) -> dict[str, float]:
        assert set(runs) == {int8.PLAIN.name, "float32"}
        return {int8.PLAIN.name: 2.0, "float32": in_float32}

    monkeypatch.setattr("maxsimd.engine.execution.int8.milliseconds_in_turns", took)
    assert int8.choose([]) == int8.PLAIN
    assert ("a layer takes 2.00 ms, and 1.00 in float32" in caplog.text) == warned


@pytest.fixture
def capped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def forget() -> None:
        for cache in (library.isa_cap, library._found, library.int8_function):
            cache.cache_clear()

    def set_cap(level: str) -> None:
        monkeypatch.setenv("MAXSIMD_MAX_CPU_ISA", level)
        forget()

    yield set_cap
    forget()


@pytest.mark.parametrize(("level", "count"), [("default", 0), ("avx2", 1), ("avx512", 2), ("avx512_vnni", 3)])
def test_nothing_above_the_cap_is_used(capped: Callable[[str], None], level: str, count: int) -> None:
    capped("all")
    runnable = [kernel for kernel in int8_linear.KERNELS if kernel.is_available()]
    capped(level)
    assert library.why_unavailable() is not None
    allowed = [kernel for kernel in int8_linear.KERNELS if kernel.is_available()]
    assert allowed == [kernel for kernel in runnable if kernel in int8_linear.KERNELS[:count]]
    assert not library.multiplies_bfloat16()
    capped("avx9")
    with pytest.raises(ValueError, match="must be one of default, avx2, avx512"):
        library.isa_cap()


_BIT16 = (torch.bfloat16, torch.float16)
_WAYS = [
    pytest.param(way, dtype, id=f"{way.name}-{dtype}")
    for dtype in (torch.float32, *_BIT16)
    for way in linear.methods_for(dtype)
    if linear.is_right_method(way, dtype)
]


@pytest.mark.parametrize(("way", "dtype"), _WAYS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
def test_ways_equal_the_plain_layer(way: linear.Method, dtype: torch.dtype, bias: bool, gelu: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(96, 64, bias=bias).to(dtype)
    assert way.make is not None
    layer = way.make(plain, gelu)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for shape in ((0,), (1,), (7,), (1, 130), (2, 67)):
        x = torch.randn(*shape, 96).to(dtype)
        with torch.inference_mode():
            expected = plain.float()(x.float())
            expected = torch.nn.functional.gelu(expected) if gelu else expected
            plain.to(dtype)
            found = layer(x)
        assert found.dtype is dtype
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def test_rows_are_rounded_up_a_little_to_few_numbers() -> None:
    for rows in range(1, 40_000):
        assert rows <= linear.rounded(rows) < max(rows + 8, rows * 9 / 8 + 1)
    assert len({linear.rounded(rows) for rows in range(1, 40_000)}) < 90


class _Wrong(linear.Float32Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.05


class _Slow(linear.Float32Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            out = super().forward(x)
        return out


class _Missing(linear.Float32Linear):
    def __init__(self, layer: torch.nn.Linear, gelu: bool) -> None:
        raise RuntimeError("not built in")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ways_that_are_wrong_slow_or_missing_are_not_taken(dtype: Any, monkeypatch: Any, caplog: Any) -> None:
    ways = [linear.Method(make.__name__, make) for make in (_Wrong, _Slow, _Missing)]
    monkeypatch.setattr(linear, "methods_for", lambda dtype: ways)
    caplog.set_level("DEBUG", "maxsimd.engine.execution.linear")
    assert linear.choose_method.__wrapped__(dtype) is linear.TORCH
    timed = caplog.messages[-1]
    assert all(part in timed for part in ("torch, by a short timing", "_Slow")), timed
    assert not any(part in timed for part in ("_Wrong", "_Missing")), timed
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert linear.replace_by_method(module, linear.TORCH) == 0
    assert linear.replace_by_method(module, ways[1]) == 16
    assert isinstance(module[0], _Slow)


def test_only_small_tables_are_converted_for_a_proof() -> None:
    large, small = torch.nn.Embedding(70_000, 64), torch.nn.Embedding(10, 64)
    backbone = torch.nn.ModuleList([large, small, torch.nn.Linear(64, 4)]).bfloat16()
    ids = torch.tensor([0, 3, 9])
    expected = large(ids).float()
    with in_float32(backbone):
        assert (large.weight.dtype, small.weight.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(large(ids), expected)
    assert large(ids).dtype is torch.bfloat16
