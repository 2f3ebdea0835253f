"""The head of late interaction as one kernel: it gives what the plain head gives, and is not used where it
does not."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.base.modules import Dense, Normalize

from maxsimd.engine.checkpoint.heads import FirstColumns, ModuleHead
from tests.unit.engine.ops.interpreted import run_interpreted


def _heads() -> list[tuple[Any, bool]]:
    """Heads of 24 inputs, and whether one kernel can take their place."""
    identity, norm = torch.nn.Identity(), Normalize(module_input_name="x")

    def dense(**options: Any) -> Dense:
        torch.manual_seed(0)
        return Dense(24, 32, **{"activation_function": identity, "module_input_name": "x", **options})

    whole = ModuleHead([dense(bias=False), norm], "x")
    return [
        (whole, True),
        (ModuleHead([dense()], "x"), True),
        (FirstColumns(ModuleHead([dense(), norm], "x"), 20, True), True),
        (FirstColumns(ModuleHead([dense()], "x"), 20, False), True),
        (FirstColumns(whole, 20, False), False),
        (ModuleHead([norm], "x"), False),
        (ModuleHead([dense(activation_function=torch.nn.Tanh()), norm], "x"), False),
        (ModuleHead([dense(use_residual=True), norm], "x"), False),
        (ModuleHead([dense(), norm, norm], "x"), False),
    ]


def check_fused_heads() -> None:
    from maxsimd.engine.device.fused_head import FusedProjection, fused

    hidden, rows = torch.randn(30, 24), np.array([0, 3, 29, 3])
    for head, possible in _heads():
        ours = fused(head, torch.float32, torch.float32)
        assert isinstance(ours, FusedProjection) == possible, str(head)
        if isinstance(ours, FusedProjection):
            exact = head(hidden[rows]).detach()
            torch.testing.assert_close(ours.gather(hidden, rows), exact, atol=1e-5, rtol=1e-5)
            assert str(ours) == str(head)


def test_a_fused_head_equals_the_plain_head() -> None:
    pytest.importorskip("triton")
    run_interpreted(check_fused_heads)


def plain_project(
    hidden: torch.Tensor, rows: torch.Tensor, projection: Any, dtype: torch.dtype
) -> torch.Tensor:
    """What the kernel computes, in plain torch."""
    out = torch.nn.functional.linear(hidden[rows].float(), projection.weight.float(), projection.bias)
    if projection.epsilon is not None:
        out = torch.nn.functional.normalize(out, dim=-1)
    return out.to(dtype)


def test_a_fused_head_that_is_wrong_or_fails_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    from maxsimd.engine.device import fused_head

    breaks: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
        (lambda out: 2 * out, "it differs from the plain head by"),
        (lambda out: out.index_fill(0, torch.tensor(7), torch.nan), "it differs from the plain head by nan"),
        (lambda out: out.flip(0), "it differs from the plain head by"),
        (lambda out: out.view(3, 0), "it failed: shape"),
    ]
    for (broken, said), dtype in product(breaks, (torch.float32, torch.bfloat16)):
        monkeypatch.setattr(
            fused_head, "project", lambda *given, broken=broken: broken(plain_project(*given))
        )
        for head, possible in _heads():
            caplog.clear()
            assert fused_head.fused(head, dtype, dtype) is head
            assert (f"the fused projection is not used: {said}" in caplog.text) == possible
