"""Attention and patches of towers by our kernels equal torch's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maxsimd.engine.execution.towers import NAME, PatchProduct, attend, attention_restored, use_kernels
from maxsimd.engine.ops import cpu as kernels

pytestmark = pytest.mark.skipif(not kernels.is_available(), reason="no compiled kernels for this processor")

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@settings(deadline=None, max_examples=60)
@given(
    pictures=st.integers(1, 4),
    heads=st.integers(1, 3),
    patches=st.integers(1, 70),
    dims=st.sampled_from([8, 16, 24, 64, 72, 80]),
    dtype=st.sampled_from([*TOLERANCES]),
    scaling=st.sampled_from([None, 0.1]),
    are_rows_apart=st.booleans(),
)
def test_attention_equals_torch(
    pictures: int,
    heads: int,
    patches: int,
    dims: int,
    dtype: torch.dtype,
    scaling: float | None,
    are_rows_apart: bool,
) -> None:
    # As towers make them: views of one product, or tensors by themselves.
    if are_rows_apart:
        product = numbers(pictures, patches, 3, heads, dims, dtype=dtype)
        query, key, value = product.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        query, key, value = (numbers(pictures, heads, patches, dims, dtype=dtype) * i for i in (1, 2, 3))
    made, weights = attend(nn.Identity(), query, key, value, None, scaling=scaling, is_causal=False)
    expected = nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), scale=scaling
    )
    assert weights is None
    assert made.shape == (pictures, patches, heads, dims)
    tolerance = TOLERANCES[dtype] * float(value.abs().max())
    torch.testing.assert_close(made.float(), expected.transpose(1, 2), atol=tolerance, rtol=0)


@pytest.mark.parametrize("what", ["mask", "causal"])
def test_what_not_all_patches_see_goes_to_torch(what: str) -> None:
    query, key, value = (numbers(2, 2, 9, 16) + i for i in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    options: dict[str, Any] = {"is_causal": True} if what == "causal" else {}
    module = SimpleNamespace(is_causal=False, num_key_value_groups=1)
    made, _ = attend(module, query, key, value, mask if what == "mask" else None, **options)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(made, expected.transpose(1, 2))


@settings(deadline=None, max_examples=40)
@given(
    sides=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    extra=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    bias=st.booleans(),
)
def test_a_product_of_patches_equals_the_convolution(sides: list[int], extra: list[int], bias: bool) -> None:
    kind = nn.Conv2d if len(sides) == 2 else nn.Conv3d
    convolution: Any = kind(3, 5, tuple(sides), stride=tuple(sides), bias=bias)
    sizes = [side + more for side, more in zip(sides, extra, strict=False)]
    x = numbers(2, 3, *sizes)
    with torch.inference_mode():
        torch.testing.assert_close(PatchProduct(convolution)(x), convolution(x), atol=1e-5, rtol=1e-5)


class TinyAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def test_only_convolutions_of_separate_patches_are_replaced() -> None:
    config = SimpleNamespace(_attn_implementation="sdpa")
    tower = nn.ModuleDict(
        {
            "patches": nn.Conv2d(3, 4, 2, stride=2),
            "overlapping": nn.Conv2d(3, 4, 3, stride=2),
            "padded": nn.Conv2d(3, 4, 2, stride=2, padding=1),
            "in_words": nn.Conv2d(3, 4, 1, padding="same"),
            "grouped": nn.Conv2d(4, 4, 2, stride=2, groups=2),
            "spread": nn.Conv2d(3, 4, 2, stride=2, dilation=2),
            "attention": TinyAttention(config),
        }
    )
    with attention_restored([tower]):
        use_kernels([tower])
        assert config._attn_implementation == NAME
    assert config._attn_implementation == "sdpa"
    replaced = [name for name, module in tower.items() if isinstance(module, PatchProduct)]
    assert replaced == ["patches"]
