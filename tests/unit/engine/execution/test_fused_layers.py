"""Fused layers: whole models with and without them, interpreted, and how many launches a layer takes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model, XLMRobertaConfig, XLMRobertaModel

from maxsimd.engine.execution.attention.interface import NAME, StepAttention, register
from maxsimd.engine.execution.attention.triton_kernel import TritonBackend
from maxsimd.engine.execution.fused_layers import fuse
from maxsimd.engine.execution.layout import Group, Layout
from maxsimd.engine.ops.triton.launch import Limits
from tests.unit.engine.execution import fused_layer_checks as checks
from tests.unit.engine.execution.launches import launches
from tests.unit.engine.ops.interpreted import run_interpreted

pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["bert", pytest.param("qwen3", marks=pytest.mark.exhaustive)])
def test_a_model_with_fused_layers_scores_as_without(name: str) -> None:
    run_interpreted(checks.check_scores, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_so_it_does_with_kernels_interpreted_from_the_start(name: str) -> None:
    run_interpreted(checks.check_scores_from_the_start, name)


@pytest.mark.parametrize("name", ["bert", pytest.param("qwen3", marks=pytest.mark.exhaustive)])
def test_so_it_does_in_bfloat16(name: str) -> None:
    run_interpreted(checks.check_bfloat16, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("bert", "llama", "gemma") else pytest.mark.exhaustive)
        for name in checks.EXPECTED
    ],
)
def test_layers_are_fused_where_they_are_built_as_expected(name: str) -> None:
    run_interpreted(checks.check_modules, name)


@pytest.mark.parametrize(
    "check",
    [
        checks.check_wrong_kernel,
        checks.check_failing_kernel,
        checks.check_mismatch,
        checks.check_others_stay,
    ],
)
def test_what_is_not_as_expected_stays(check: Callable[[], None]) -> None:
    run_interpreted(check)


def test_a_model_that_reads_pictures_is_fused_too() -> None:
    run_interpreted(checks.check_pictures)


# Launches, counted without a GPU: what kernels compute does not matter here.

ROWS = 40


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched and tables are asked for as on a GPU of compute capability 9, and trials, which
    compare what was not computed, end well."""
    monkeypatch.setattr("maxsimd.engine.ops.triton.launch.INTERPRETED", True)
    hopper = Limits(9, 227 * 1024, 132)
    monkeypatch.setattr("maxsimd.engine.ops.triton.attention.limits", lambda device: hopper)
    for module in ("bert", "decoder"):
        for name in ("agrees", "asks_the_same"):
            monkeypatch.setattr(f"maxsimd.engine.execution.fused_layers.{module}.{name}", lambda *given: True)


def launches_of(layer: Any, hidden: int, **options: Any) -> list[str]:
    """What one layer launches for a step of two sequences, in bfloat16, attention by our kernel included."""
    register()
    backend = TritonBackend()
    layout = Layout(causal=False, groups=(Group(0, 2, ROWS // 2, (ROWS // 2,) * 2),))
    attention = StepAttention(backend, backend.prepare(layout, torch.device("cpu")))
    x = torch.randn(1, ROWS, hidden).bfloat16()
    for _ in range(2):  # what is made once a step is made in the first run
        with launches() as launched:
            layer(x, attention_mask=None, step_attention=attention, **options)
    return launched


def test_an_encoder_layer_takes_eight_launches_instead_of_twelve(as_on_a_gpu: None) -> None:
    config = XLMRobertaConfig(
        vocab_size=100, hidden_size=128, num_hidden_layers=1, num_attention_heads=2, intermediate_size=256
    )
    config._attn_implementation = NAME
    register()
    backbone = XLMRobertaModel(config, add_pooling_layer=False).bfloat16().eval()
    plain = launches_of(backbone.encoder.layer[0], 128)
    with launches():
        assert fuse(backbone) == 3
    fused = launches_of(backbone.encoder.layer[0], 128)
    assert len(plain) == 12, plain
    assert fused == [
        "addmm",
        "attention_kernel",
        "addmm",
        "add_layer_norm_kernel",
        "addmm",
        "gelu",
        "addmm",
        "add_layer_norm_kernel",
    ]


def test_a_decoder_layer_takes_nine_launches_instead_of_many(as_on_a_gpu: None) -> None:
    config = Qwen3Config(
        vocab_size=100, hidden_size=128, num_hidden_layers=1, num_attention_heads=4, head_dim=64,
        num_key_value_heads=2, intermediate_size=256,
    )  # fmt: skip
    config._attn_implementation = NAME
    register()
    backbone = Qwen3Model(config).bfloat16().eval()
    turned = torch.ones(1, ROWS, 64).bfloat16()
    plain = launches_of(backbone.layers[0], 128, position_embeddings=(turned, turned))
    with launches():
        assert fuse(backbone) == 1
    fused = launches_of(backbone.layers[0], 128, position_embeddings=(turned, turned))
    assert len(plain) > 40, plain
    assert fused == [
        "rms_norm_kernel",
        "mm",
        "norm_rotary_kernel",
        "attention_kernel",
        "mm",
        "rms_norm_kernel",
        "mm",
        "swiglu_kernel",
        "addmm_",
    ]
