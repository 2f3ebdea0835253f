"""Models with layers of the size of published ones, which launch what those launch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig, Qwen3Config, Qwen3Model, XLMRobertaConfig, XLMRobertaModel

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.execution.attention.interface import NAME, register
from maxsimd.engine.execution.packed_runner import PackedRunner
from tests.dry_run.gpu import GPU, FakeGPU
from tests.dry_run.models import BACKENDS, DTYPE, first_layers, fuse_layers, move
from tests.dry_run.steps import Ids, step_of

# Tokens of the sequences of a large step: 16,384.
SEQUENCES = [1024] * 16

XLM_R_LARGE = XLMRobertaConfig(
    hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=2,
    max_position_embeddings=1026, vocab_size=1000,
)  # fmt: skip
QWEN3_0_6B = Qwen3Config(
    hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    num_hidden_layers=2, vocab_size=1000,
)  # fmt: skip
SHAPES: Mapping[str, tuple[PretrainedConfig, Any, dict[str, Any]]] = {
    "XLM-R-large": (XLM_R_LARGE, XLMRobertaModel, {"add_pooling_layer": False}),
    "Qwen3-0.6B": (QWEN3_0_6B, Qwen3Model, {}),
}


def launches_a_layer(gpu: FakeGPU, shape: str, like: LoadedModel, backend: str) -> int:
    """Two layers minus one, in a step of 16,384 tokens. `like` is a small model of the same kind."""
    register()
    config, kind, options = SHAPES[shape]
    config._attn_implementation = NAME
    backbone = kind(config, **options).to(DTYPE).eval().requires_grad_(False)
    fuse_layers(backbone)
    move([backbone])
    runner = PackedRunner(replace(like, backbone=backbone), GPU, BACKENDS[backend]())
    ids = Ids(like)
    step = step_of(*(ids.text(length) for length in SEQUENCES))
    with gpu.counted() as two:
        runner.forward(step)
    with first_layers(backbone, -1), gpu.counted() as one:
        runner.forward(step)
    return two.num_launches - one.num_launches
