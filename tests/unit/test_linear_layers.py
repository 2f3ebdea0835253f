"""Linear layers and tables of a backbone: replaced by oneDNN's, and converted for a proof."""

import pytest
import torch
from transformers.activations import ACT2FN

from maxsimd.engine.execution import linear
from maxsimd.engine.execution.selfcheck.float32 import in_float32


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 products here")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
def test_a_prepacked_linear_equals_the_plain_one(bias: bool, gelu: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(96, 64, bias=bias).bfloat16()
    packed = linear.PrepackedLinear(plain, gelu)
    for rows in (1, 7, 130):
        x = torch.randn(1, rows, 96).bfloat16()
        with torch.inference_mode():
            expected = plain(x).float()
            expected = torch.nn.functional.gelu(expected) if gelu else expected
            torch.testing.assert_close(packed(x).float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("name", "exact"), [("gelu", True), ("gelu_new", False), ("relu", False)])
def test_only_the_exact_gelu_is_fused(name: str, exact: bool) -> None:
    assert linear._is_exact_gelu(ACT2FN[name]) is exact


def test_large_tables_are_not_converted_for_a_proof_and_small_ones_are() -> None:
    large, small = torch.nn.Embedding(70_000, 64), torch.nn.Embedding(10, 64)
    backbone = torch.nn.ModuleList([large, small, torch.nn.Linear(64, 4)]).bfloat16()
    ids = torch.tensor([0, 3, 9])
    expected = large(ids).float()
    with in_float32(backbone):
        assert large.weight.dtype is torch.bfloat16
        assert small.weight.dtype is torch.float32
        assert torch.equal(large(ids), expected)
    assert large(ids).dtype is torch.bfloat16
