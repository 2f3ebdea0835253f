"""Fixtures that the tests of steps share."""

import pytest
import torch

from maxsimd.engine.execution.attention.varlen import VarlenBackend
from tests.unit.engine.execution.test_packed import plain_varlen


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> VarlenBackend:
    """By torch's kernel for GPUs, with plain torch in its place."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
    return VarlenBackend(torch.device("cpu"))
