"""ALiBi as a bias by distance, which attention takes as it takes T5's."""

from dataclasses import replace

import numpy as np
import torch

from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.execution.attention.interface import NAME, register
from maxsimd.engine.execution.fused_layers.bert import fused_self_attention
from maxsimd.engine.execution.fused_layers.trial import recorded
from maxsimd.engine.models.alibi import AlibiBias, slopes_of
from maxsimd.engine.models.jina_bert import JinaBertConfig, JinaBertSelfAttention
from tests.checkpoints import jina
from tests.checkpoints.shared import SharedCheckpoints

CPU = torch.device("cpu")


def test_the_bias_is_the_slope_times_the_distance() -> None:
    for tokens in (1, 64, 65, 66, 129, 130, 1_000):
        query = torch.zeros(1, 4, tokens, 8)
        found = AlibiBias(4).reaching(tokens, CPU).terms(query, query, 1.0)
        apart = (torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]).abs()
        torch.testing.assert_close(found, torch.stack([-slope * apart for slope in slopes_of(4)]))


def test_one_table_serves_many_lengths() -> None:
    bias = AlibiBias(4)
    assert bias.reaching(3, CPU) is bias.reaching(65, CPU)
    assert bias.reaching(66, CPU) is bias.reaching(129, CPU)
    assert bias.reaching(66, CPU) is not bias.reaching(65, CPU)


def test_a_fused_layer_hands_the_bias_on() -> None:
    config = JinaBertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    register()
    config._attn_implementation = NAME
    fused = fused_self_attention(JinaBertSelfAttention(config).eval())
    assert fused is not None
    bias = AlibiBias(4).reaching(5, CPU)
    x = torch.randn(1, 5, 32)
    asked = recorded(lambda attention: fused(x, step_attention=attention, position_bias=bias)[0])
    assert asked is not None
    assert asked[0].relative is bias


async def test_however_it_is_run_it_embeds_alike(checkpoints: SharedCheckpoints) -> None:
    texts = ["one", "a few more words than one", "words " * 60, "three words here"]
    usual = EngineConfig(model=checkpoints(jina.embeddings_v2_code), dtype="float32", threads=1)
    embeddings = []
    for config in (usual, replace(usual, kernels="torch"), replace(usual, packing="off")):
        async with Engine(config) as engine:
            packed = engine.device_model.prepared.not_packed is None
            assert packed == (config.packing == "auto")
            embeddings.append((await engine.embed(texts)).embeddings)
    for other in embeddings[1:]:
        np.testing.assert_allclose(other, embeddings[0], atol=2e-6, rtol=1e-5)
