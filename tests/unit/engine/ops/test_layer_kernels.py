"""The kernels of fused layers: interpreted on a CPU against plain torch, and compiled for GPUs."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.bench.gpu.ahead_of_time import compiled
from maxsimd.bench.gpu.layer_kernels import variants
from tests.unit.engine.ops.interpreted import run_interpreted
from tests.unit.engine.ops.kernel_checks import DTYPES, examples

# Both sides are float32 until they round once; they may round to neighbours.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
WIDTHS = st.sampled_from([1, 16, 100, 384, 1000, 1024])
ROWS = st.integers(0, 5)


def same(ours: torch.Tensor, exact: torch.Tensor) -> None:
    assert ours.dtype is exact.dtype
    tolerance = _TOLERANCE[exact.dtype]
    torch.testing.assert_close(ours.float().cpu(), exact.float(), atol=tolerance, rtol=tolerance)


def numbers(*shape: int, dtype: torch.dtype, seed: int, apart: int = 0) -> torch.Tensor:
    """Random rows, that many columns apart in memory."""
    random = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + apart, generator=random).to(dtype)
    return wide[..., : shape[-1]]


def check_layer_norm(device: str) -> None:
    from maxsimd.engine.ops.triton import layer_norm as norms

    @examples(40, device)
    @given(
        ROWS,
        WIDTHS,
        st.sampled_from(DTYPES),
        st.sampled_from([0, 16]),
        st.sampled_from([0.0, 30.0]),
        st.booleans(),
    )
    def compare(rows: int, width: int, dtype: torch.dtype, apart: int, mean: float, biased: bool) -> None:
        x = numbers(rows, width, dtype=dtype, seed=1, apart=apart) + mean
        residual = numbers(rows, width, dtype=dtype, seed=2, apart=2 * apart)
        weight, some_bias = (numbers(width, dtype=dtype, seed=seed) for seed in (3, 4))
        bias = some_bias if biased else None
        there = x.to(device), residual.to(device)
        norm = weight.to(device), some_bias.to(device) if biased else None, 1e-5
        same(norms.layer_norm(there[0], *norm), norms.layer_norm_reference(x, weight, bias, 1e-5))
        exact = norms.add_layer_norm_reference(x, residual, weight, bias, 1e-5)
        same(norms.add_layer_norm(*there, *norm), exact)
        total, normed = norms.sum_and_layer_norm(*there, *norm)
        same(total, norms.sum_and_layer_norm_reference(x, residual, weight, bias, 1e-5)[0])
        # Computed from the rounded sum; the interpreter rounds bfloat16 differently.
        same(normed, norms.layer_norm_reference(total.cpu(), weight, bias, 1e-5))

    compare()


def check_rms_norm(device: str) -> None:
    from maxsimd.engine.ops.triton.rms_norm import (
        add_rms_norm,
        add_rms_norm_reference,
        rms_norm,
        rms_norm_reference,
    )

    @examples(40, device)
    @given(ROWS, WIDTHS, st.sampled_from(DTYPES), st.sampled_from([0, 16]), st.sampled_from([1e-6, 0.5]))
    def compare(rows: int, width: int, dtype: torch.dtype, apart: int, epsilon: float) -> None:
        x = numbers(rows, width, dtype=dtype, seed=1, apart=apart)
        residual = numbers(rows, width, dtype=dtype, seed=2, apart=2 * apart)
        weight = numbers(width, dtype=dtype, seed=3)
        there = [each.to(device) for each in (x, residual, weight)]
        same(rms_norm(there[0], there[2], epsilon), rms_norm_reference(x, weight, epsilon))
        wide = weight.float() + 1  # as Gemma has it
        same(rms_norm(there[0], wide.to(device), epsilon), rms_norm_reference(x, wide, epsilon))
        total, normed = add_rms_norm(*there, epsilon)
        exact_total, exact = add_rms_norm_reference(x, residual, weight, epsilon)
        same(total, exact_total)  # the interpreter rounds to bfloat16 in its own way
        same(normed, exact)

    compare()


def check_norm_rotary(device: str) -> None:
    from maxsimd.engine.ops.triton.rotary import HeadNorms, norm_rotary_, norm_rotary_reference

    @examples(40, device)
    @given(
        st.integers(0, 4),
        st.tuples(st.integers(1, 9), st.integers(1, 5)),
        st.sampled_from([16, 32, 64, 80, 128, 256]),
        st.sampled_from(DTYPES),
        st.booleans(),
    )
    def compare(rows: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, normed: bool) -> None:
        together = heads[0] + 2 * heads[1]
        qkv = numbers(rows, together, head_dim, dtype=dtype, seed=1)
        # The halves differ, which they do not in models, so that each must be read.
        cos, sin = (numbers(rows, head_dim, dtype=dtype, seed=seed) for seed in (2, 3))
        norms = None
        if normed:
            norms = HeadNorms(*(numbers(head_dim, dtype=dtype, seed=seed) for seed in (4, 5)), 1e-6)
        exact = norm_rotary_reference(qkv, cos, sin, heads, norms)
        there = qkv.to(device, copy=True)
        if norms is not None:
            norms = HeadNorms(norms.query.to(device), norms.key.to(device), norms.epsilon)
        norm_rotary_(there, cos.to(device), sin.to(device), heads, norms)
        same(there, exact)
        values = slice(sum(heads), None)
        assert torch.equal(there[:, values].cpu(), qkv[:, values])

    compare()


def check_gated(device: str) -> None:
    from maxsimd.engine.ops.triton.swiglu import ACTIVATIONS, gated, gated_reference

    @examples(30, device)
    @given(ROWS, st.sampled_from([1, 48, 1024, 1500]), st.sampled_from(DTYPES), st.sampled_from([1.0, 60.0]))
    def compare(rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
        gate_up = numbers(rows, 2 * width, dtype=dtype, seed=rows, apart=16) * scale
        gate, up = gate_up.float().chunk(2, dim=-1)
        # 1 + erf(x) and the like are rounded to float32 where they are small, beside 1.
        lost = 4 * torch.finfo(torch.float32).eps * (gate * up).abs()
        for activation in ACTIVATIONS:
            exact = gated_reference(gate_up, activation)
            found = gated(gate_up.to(device), activation)
            assert found.dtype is exact.dtype
            apart = (found.float().cpu() - exact.float()).abs()
            allowed = lost + _TOLERANCE[dtype] * exact.float().abs() + torch.finfo(dtype).smallest_normal
            assert (apart <= allowed).all(), f"{activation}: {float((apart - allowed).max())} too far apart"

    compare()
    broken = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]], device=device)
    for activation in ACTIVATIONS:
        assert gated(broken, activation).isnan().all()


CHECKS = [check_layer_norm, check_rms_norm, check_norm_rotary, check_gated]


pytest.importorskip("triton")


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
    assert tried >= 30
