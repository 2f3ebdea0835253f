"""GGUF files that cannot be served exactly are refused, with what to do instead."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from maxsimd.engine import EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from tests.checkpoints import gguf_models
from tests.checkpoints.shared import SharedCheckpoints

CPU = torch.device("cpu")
LAST = "tokenizer.ggml.add_eos_token"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(gguf_models.qwen3_reranker, **{"classifier.output_labels": ["no", "yes"]}),
         r"answers with \['no', 'yes'\]"),
        (partial(gguf_models.qwen3, **{"rope.scaling.type": "yarn"}), "scales positions by 'yarn'"),
        (partial(gguf_models.qwen3, **{"expert_count": 8}), "sets qwen3.expert_count, which is not"),
        (partial(gguf_models.qwen3, **{"attention.causal": False}), "attends both ways"),
        (partial(gguf_models.qwen3, **{"attention.value_length": 64}), "another qwen3.attention.value"),
        (partial(gguf_models.qwen3, **{"tokenizer.ggml.pre": "llama-bpe"}),
         "no tokeniser that is proven right: .*'llama-bpe'.*put the tokenizer.json"),
        (partial(gguf_models.qwen3, **{"split.count": 2}), "join them with llama-gguf-split"),
        (partial(gguf_models.qwen3, kind="Q4_1"), "as Q4_1; name a version whose weights are F32, F16"),
        (partial(gguf_models.qwen3_embedding, **{LAST: None}), "does not say whether a token ends texts"),
        (partial(gguf_models.bge, pooling_type=0), "does not say how it pools .* put the modules.json"),
        (partial(gguf_models.bge, pooling_type=4), "has left out a part of its classifier"),
        (partial(gguf_models.bge, **{"attention.causal": True}), "not said to attend both ways"),
        (partial(gguf_models.bge, block_count=4), "missing: encoder.layer.3"),
        (partial(gguf_models.bge, feed_forward_length=128), r"wrongly shaped: encoder.layer.0.intermediate"),
        (partial(gguf_models.bge, block_count=2), r"unexpected: encoder.layer.2"),
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused(
    build: Callable[[Path], str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(model=build(tmp_path), dtype="float32"), CPU)


def _written(path: Path, architecture: str, tensors: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_config_beside_it_that_says_both_directions_is_refused(tmp_path: Path) -> None:
    model = Path(gguf_models.qwen3_embedding(tmp_path))
    folder = model if model.is_dir() else model.parent
    (folder / "config.json").write_text('{"is_causal": false}', encoding="utf-8")
    with pytest.raises(ModelLoadError, match="reads in both directions"):
        load_model(EngineConfig(model=str(model)), CPU)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = _written(tmp_path / "some.gguf", "mamba", {"token_embd.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ModelLoadError, match=r"is a .mamba.; of GGUF files bert, gemma, llama, qwen2, qwen3"):
        load_model(EngineConfig(model=str(path)), CPU)


def test_tensors_that_are_not_read_are_refused(tmp_path: Path) -> None:
    frequencies = {"rope_freqs.weight": torch.ones(32)}
    with pytest.raises(ModelLoadError, match=r"scales positions as Llama 3.1 does"):
        load_model(EngineConfig(model=gguf_models.llama(tmp_path / "one", more=frequencies)), CPU)
    unnamed = {"blk.0.attn_sinks.weight": torch.ones(4)}
    with pytest.raises(ModelLoadError, match=r"tensors that a llama is not read with here: blk.0.attn_sinks"):
        load_model(EngineConfig(model=gguf_models.llama(tmp_path / "two", more=unnamed)), CPU)


def test_a_tokeniser_of_another_model_beside_it_is_refused(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    shutil.copy(checkpoints(gguf_models.qwen3), tmp_path / "model.gguf")
    other = Path(checkpoints(gguf_models.bge_reranker)).parent
    shutil.copy(other / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(ModelLoadError, match=r"the tokenizer.json beside .* is another model's: its token 0"):
        load_model(EngineConfig(model=str(tmp_path)), CPU)


def test_a_folder_with_several_files_asks_for_one(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(checkpoints(gguf_models.qwen3), tmp_path / name)
    with pytest.raises(ModelLoadError, match=r"has 2 GGUF files \(a.gguf, b.gguf\); name one of them"):
        load_model(EngineConfig(model=str(tmp_path)), CPU)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(ModelLoadError, match="cannot be read as a GGUF file"):
        load_model(EngineConfig(model=str(tmp_path / "some.gguf")), CPU)
    with pytest.raises(ModelLoadError, match=r"there is no file '/nowhere/some.gguf'"):
        load_model(EngineConfig(model="/nowhere/some.gguf"), CPU)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = Path(gguf_models.bge(tmp_path, kind="F32"))
    reader = gguf.GGUFReader(path, "r+")
    norm = next(tensor for tensor in reader.tensors if tensor.name == "token_embd_norm.weight")
    norm.data[0] = np.nan
    reader.data.flush()
    assert norm.tensor_type is Kind.F32
    with pytest.raises(ModelLoadError, match=r"not finite in its tensor embeddings.LayerNorm.weight"):
        load_model(EngineConfig(model=str(path), dtype="float32"), CPU)
