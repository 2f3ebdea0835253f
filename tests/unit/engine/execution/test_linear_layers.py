"""Linear layers and tables of a backbone: replaced by faster ones of torch, and converted for a proof."""

import pytest
import torch

from maxsimd.engine.execution import torch_linear
from maxsimd.engine.execution.selfcheck.float32 import in_float32

_BIT16 = (torch.bfloat16, torch.float16)
_WAYS = [
    pytest.param(way, dtype, id=f"{way.name}-{dtype}")
    for dtype in (torch.float32, *_BIT16)
    for way in torch_linear.candidates(dtype)
    if torch_linear.is_right(way, dtype)
]


@pytest.mark.parametrize(("way", "dtype"), _WAYS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
def test_each_way_equals_the_plain_layer(
    way: torch_linear.Way, dtype: torch.dtype, bias: bool, gelu: bool
) -> None:
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
        assert rows <= torch_linear.rounded(rows) < max(rows + 8, rows * 9 / 8 + 1)
    assert len({torch_linear.rounded(rows) for rows in range(1, 40_000)}) < 90


class _Wrong(torch_linear.Float32Linear):
    """A product that is a little too large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.05


class _Slow(torch_linear.Float32Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            out = super().forward(x)
        return out


class _Missing(torch_linear.Float32Linear):
    def __init__(self, layer: torch.nn.Linear, gelu: bool) -> None:
        raise RuntimeError("not built in")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ways_that_are_wrong_or_slow_or_missing_are_not_taken(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ways = [torch_linear.Way(make.__name__, make) for make in (_Wrong, _Slow, _Missing)]
    monkeypatch.setattr(torch_linear, "candidates", lambda dtype: ways)
    caplog.set_level("DEBUG", "maxsimd.engine.execution.torch_linear")
    assert torch_linear.choose_way.__wrapped__(dtype) is torch_linear.TORCH
    timed = caplog.messages[-1]
    assert "torch, by a short timing" in timed
    assert "_Slow" in timed
    assert "_Wrong" not in timed
    assert "_Missing" not in timed
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert torch_linear.lay_out(module, torch_linear.TORCH) == 0
    assert torch_linear.lay_out(module, ways[1]) == 16
    assert isinstance(module[0], _Slow)


def test_only_small_tables_are_converted_for_a_proof() -> None:
    large, small = torch.nn.Embedding(70_000, 64), torch.nn.Embedding(10, 64)
    backbone = torch.nn.ModuleList([large, small, torch.nn.Linear(64, 4)]).bfloat16()
    ids = torch.tensor([0, 3, 9])
    expected = large(ids).float()
    with in_float32(backbone):
        assert large.weight.dtype is torch.bfloat16
        assert small.weight.dtype is torch.float32
        assert torch.equal(large(ids), expected)
    assert large(ids).dtype is torch.bfloat16
