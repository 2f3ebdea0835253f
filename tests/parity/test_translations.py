"""Settings of published encoders that would change what they compute are refused, not passed over."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maxsimd.engine import EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.models.alibi import slopes_of
from tests.checkpoints import bi_encoders, gte, jina, nomic
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.plain_encoders import alibi_slopes

REFUSED: list[tuple[Callable[[Path], str], str, Any]] = [
    (gte.multilingual, "position_embedding_type", "absolute"),
    (gte.multilingual, "layer_norm_type", "rms_norm"),
    (gte.multilingual, "logn_attention_scale", True),
    (gte.multilingual, "pack_qkv", False),
    (gte.multilingual, "rope_scaling", {"type": "dynamic", "factor": 2.0}),
    (gte.multilingual, "rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 0.75}),
    (jina.reranker_v2, "position_embedding_type", "relative"),
    (jina.reranker_v2, "pad_vocab_size_multiple", 64),
    (jina.reranker_v2, "hidden_act", "relu"),
    (jina.embeddings_v2, "feed_forward_type", "original"),
    (jina.embeddings_v2, "is_decoder", True),
    (nomic.v2_moe, "moe_normalize_expert_weights", True),
    (nomic.v2_moe, "num_shared_experts", 1),
    (nomic.v2_moe, "mlp_fc1_bias", False),
    (nomic.v2_moe, "rotary_scaling_factor", 2.0),
    (bi_encoders.nomic, "rotary_emb_fraction", 0.5),
    (bi_encoders.nomic, "activation_function", "geglu"),
]


def _with(checkpoints: SharedCheckpoints, build: Callable[[Path], str], folder: Path, **settings: Any) -> str:
    """A copy of a checkpoint whose config has other settings."""
    copy = checkpoints.copy(build, folder / "copy" / "checkpoint")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | settings))
    return str(copy)


@pytest.mark.parametrize(("build", "name", "value"), REFUSED)
def test_a_setting_that_is_not_carried_out_is_refused(
    build: Callable[[Path], str], name: str, value: Any, checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    path = _with(checkpoints, build, tmp_path, **{name: value})
    with pytest.raises(
        ModelLoadError, match=f"this checkpoint .*{'rotary' if name == 'rope_scaling' else name}"
    ):
        load_model(EngineConfig(model=path), torch.device("cpu"))


def test_alibaba_configs_have_the_defaults_of_their_code(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    copy = Path(_with(checkpoints, gte.multilingual, tmp_path))
    config = json.loads((copy / "config.json").read_text())
    for name in ("max_position_embeddings", "rope_theta", "rope_scaling"):
        del config[name]
    (copy / "config.json").write_text(json.dumps(config))
    backbone: Any = load_model(EngineConfig(model=str(copy)), torch.device("cpu")).backbone
    assert backbone.config.max_position_embeddings == 2048
    assert backbone.config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}


def test_the_layout_of_a_jina_bert_is_told_by_its_tensors(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    code = {"AutoModel": "modeling_bert.JinaBertModel"}
    path = _with(checkpoints, jina.embeddings_v2_code, tmp_path, _name_or_path="", auto_map=code)
    backbone: Any = load_model(EngineConfig(model=path), torch.device("cpu")).backbone
    assert backbone.config.norms_queries_and_keys


@pytest.mark.parametrize("normed", [True, False])
def test_the_layout_of_a_pickled_jina_bert_is_told_by_its_config(
    normed: bool, checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    build = jina.embeddings_v2_code if normed else jina.embeddings_v2
    folder = Path(_with(checkpoints, build, tmp_path))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    config = EngineConfig(model=str(folder), allow_pickle=True)
    backbone: Any = load_model(config, torch.device("cpu")).backbone
    assert backbone.config.norms_queries_and_keys == normed


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16, 20])
def test_the_slopes_of_alibi_are_those_of_its_authors(heads: int) -> None:
    torch.testing.assert_close(torch.tensor(slopes_of(heads)), alibi_slopes(heads))
