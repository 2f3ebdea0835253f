"""Checkpoints' files are read in every form and wording, and messages say how."""

import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.checkpoint.files import read_files
from maxsimd.engine.checkpoint.gguf import from_gguf
from maxsimd.engine.checkpoint.quantized import quantized_weights
from maxsimd.engine.execution.self_check.rules import why_not_packed
from maxsimd.engine.inspection import inspect_model
from maxsimd.engine.ops.cpu.blocks import BlockTensor
from maxsimd.engine.ops.cpu.library import is_available
from tests.checkpoints import (
    bi_encoders,
    cross_encoders,
    gguf_models,
    gte,
    jina,
    language_models,
    late_interaction,
    quantized,
    retrained,
    t5,
    vision_language,
)
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.changes import CPU, settings, without_settings, written
from tests.parity.conftest import Changed
from tests.parity.families import dequantised
from tests.parity.pictures import PAGES


def _backbone(path: str, **options: Any) -> Any:
    return load_model(EngineConfig(model=path, **options), CPU).backbone


def test_alibaba_configs_have_the_defaults_of_their_code(changed: Changed) -> None:
    edit = without_settings("max_position_embeddings", "rope_theta", "rope_scaling")
    config = _backbone(changed(gte.multilingual, edit)).config
    assert config.max_position_embeddings == 2048
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}


def test_the_layout_of_a_jina_bert_is_told_by_its_tensors(changed: Changed, tmp_path: Path) -> None:
    edit = settings(_name_or_path="", auto_map={"AutoModel": "modeling_bert.JinaBertModel"})
    assert _backbone(changed(jina.embeddings_v2_code, edit)).config.norms_queries_and_keys
    for build in (jina.embeddings_v2_code, jina.embeddings_v2):
        folder = tmp_path / build.__name__
        path = build(folder)
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        norms = _backbone(path, allow_pickle=True).config.norms_queries_and_keys
        assert norms == (build is jina.embeddings_v2_code)


def test_configs_say_the_direction(changed: Changed, checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    assert load_model(EngineConfig(model=changed(retrained.gte_qwen2, settings(is_causal=True))), CPU).causal
    both_ways = cross_encoders.qwen2(tmp_path / "both ways")
    settings(is_causal=False)(tmp_path / "both ways")
    model = load_model(EngineConfig(model=both_ways), CPU)
    assert not model.causal
    assert model.tasks["classify"].pooling == "last"
    for said in ("field", "class", "code"):
        path = checkpoints(partial(retrained.both_ways, kind="qwen3", said=said))
        assert not load_model(EngineConfig(model=path), CPU).causal


def test_code_that_might_read_otherwise_is_mentioned(
    changed: Changed, checkpoints: SharedCheckpoints, caplog: pytest.LogCaptureFixture
) -> None:
    for build in (retrained.gte_qwen2, retrained.voyage_4_nano, retrained.lfm2_5_colbert):
        assert not load_model(EngineConfig(model=checkpoints(build)), CPU).causal
        assert not caplog.records, "it is read as its code does"
    path = changed(bi_encoders.qwen3, settings(auto_map={"AutoModel": "modeling_qwen.Qwen3Model"}))
    assert load_model(EngineConfig(model=path), CPU).causal
    assert "code of its own, which is not run" in caplog.text


def test_an_instructor_that_pools_prompts_is_said(changed: Changed, caplog: pytest.LogCaptureFixture) -> None:
    path = changed(bi_encoders.without_prompt, written("README.md", "# hkunlp/instructor-base"))
    for i, expected in enumerate((False, True, True)):  # the last by a recipe
        assert load_model(EngineConfig(model=path), CPU).query.pool_prompt == expected
        assert ("false to its 1_Pooling/config.json" in caplog.text) == expected
        caplog.clear()
        if i == 0:
            without_settings("include_prompt", file="1_Pooling/config.json")(Path(path))


_MXBAI = "mixedbread-ai/mxbai-rerank-base-v2"
_QWEN3 = language_models.qwen3_reranker


@pytest.mark.parametrize(
    ("build", "edit", "said"),
    [
        (_QWEN3, None, "WARNING Qwen/Qwen3-Reranker-0.6B"),
        (_QWEN3, written("README.md", "---\n# Qwen3-Reranker-4B\n"), "INFO Qwen/Qwen3-Reranker-0.6B"),
        (_QWEN3, written("README.md", "# zerank-1\n# Qwen3-Reranker"), "WARNING Qwen/Qwen3-Reranker-0.6B"),
        (_QWEN3, settings(_name_or_path="a/qwen3_reranker"), "INFO Qwen/Qwen3-Reranker-0.6B"),
        (t5.monot5, None, "WARNING castorini/monot5-base-msmarco"),
        *((partial(gguf_models.qwen2, **{"general.name": name}), None, f"{level} {_MXBAI}")
          for name, level in (("Gte Qwen2", "WARNING"), ("Mxbai Rerank v2", "INFO"))),
    ],
)  # fmt: skip
def test_it_says_which_reranker_a_model_is_taken_for(
    build: Any, edit: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = build(tmp_path / "a")
    if edit is not None:
        edit(tmp_path / "a")
    caplog.set_level("INFO", "maxsimd")
    load_model(EngineConfig(model=path), CPU)
    level, name = said.split()
    assert [each.levelname for each in caplog.records if name in each.getMessage()] == [level]


def test_a_causal_lfm2_is_packed_if_attention_leaves_ends_out(checkpoints: SharedCheckpoints) -> None:
    model = load_model(EngineConfig(model=checkpoints(retrained.lfm2_colbert)), CPU)
    assert "cannot leave out" in (why_not_packed(model, {None}, causal_ends=False) or "")
    assert why_not_packed(model, {None}, causal_ends=True) is None


def test_token_compression_is_said(checkpoints: SharedCheckpoints, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = checkpoints(retrained.bge_gemma2)
    options = {"compress_ratio": 4, "compress_layers": "1,3", "cutoff_layer": 2}
    rows = inspect_model(EngineConfig(model=path, dtype="float32", **options))  # type: ignore[arg-type]
    assert rows["compression"] == "every 4 rows of a document become one behind layer 1"
    assert rows["attention"] == "causal, whole sequences"
    assert "not compressed behind layers that are not run, as in FlagEmbedding: 3" in caplog.text
    assert load_model(EngineConfig(model=path, compress_ratio=1), CPU).compression is None


@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_is_used_unless_there_are_weights_beside_it(
    checkpoints: SharedCheckpoints, engines: Engines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(checkpoints(vision_language.colqwen2_5_adapter))
    with_weights = Path(shutil.copytree(folder / "merged", tmp_path / "with weights"))
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder / name, with_weights / name)
        shutil.copy(folder / name, alone / name)
    scores = []
    for each in (folder / "merged", alone):
        engine = await engines(EngineConfig(model=str(each), dtype="float32"))
        scores.append((await engine.score("What is it?", [*PAGES[:2], "a text"], cache="bypass")).scores)
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)
    tensors, expected = (_backbone(str(each)).state_dict() for each in (with_weights, folder / "merged"))
    assert all(torch.equal(tensors[name], each) for name, each in expected.items())
    assert "has weights of its own; the adapter beside them is not used" in caplog.text


TEXTS = [
    "What is it?",
    "  two  spaces,\tand a tab\n\n\nand lines  ",
    "caf\u00e9 and cafe\u0301, na\u00efve \u00dcbung \u1e9e",
    "it's John's, they'LL 12345 3.14",
    "<|im_start|>user <think> </think><|im_end|> <|endoftext|> <|im_star",
    *("日本語 한국어", "русский \U0001f600 مرحبا", "", " "),
    "def f(x):\n    return x[0] # [PAD4000] [MASK] [unused1] ##ing",
]


@pytest.mark.parametrize(
    "build", [gguf_models.qwen3, gguf_models.qwen3_embedding, gguf_models.bge, gguf_models.bge_reranker]
)
def test_texts_have_the_same_tokens(build: Any, checkpoints: SharedCheckpoints, pairs: list[Pair]) -> None:
    path = checkpoints(build)
    with from_gguf(path, False) as (folder, _):
        ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(dequantised(path))
    texts = [*TEXTS, *(pair.document for pair in pairs[:10])]
    for text in texts:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        bare = {"add_special_tokens": False}
        assert ours(text, **bare)["input_ids"] == theirs(text, **bare)["input_ids"], text
    for first, second in itertools.pairwise(texts):
        assert dict(ours(first, second)) == dict(theirs(first, second))
    assert len({load_model(EngineConfig(model=path), CPU).fingerprint for _ in "ab"}) == 1, "a random pooler"


@pytest.mark.parametrize(
    "build", [partial(gguf_models.llama, stored="Q8_0"), partial(gguf_models.qwen3_reranker, kind="Q5_K")]
)
def test_tensors_in_blocks_are_the_expanded_ones(build: Any, checkpoints: SharedCheckpoints) -> None:
    read = []
    for in_blocks in (True, False):
        with from_gguf(checkpoints(build), in_blocks) as (_, stored):
            assert stored is not None
            read.append(stored.read())
    kept, plain = read
    assert any(isinstance(tensor, BlockTensor) for tensor in kept.values()) == is_available()
    assert kept.keys() == plain.keys()
    assert all(torch.equal(kept[name] + 0, plain[name]) for name in plain)


@pytest.mark.parametrize("scheme", quantized.SCHEMES)
def test_quantised_tensors_are_what_the_formula_says(scheme: str, checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(partial(quantized.qwen3_reranker, scheme=scheme))
    plain = load_file(f"{dequantised(path)}/model.safetensors")
    stored = quantized_weights(path, None, read_files(path, None))
    assert stored is not None
    ours = stored.read()
    assert ours.keys() == plain.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, plain[name], rtol=1e-6, atol=1e-7)


def test_what_is_left_out_is_said(checkpoints: SharedCheckpoints, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoints(partial(quantized.qwen3_reranker, scheme="w8a8"))
    model = load_model(EngineConfig(model=path, dtype="float32"), CPU)
    said = "compressed-tensors, int-quantized; the rounding of activations to int8 is left out"
    assert model.stored_as == said
    assert said in caplog.text


def test_pylate_loads_silently(checkpoints: SharedCheckpoints, caplog: pytest.LogCaptureFixture) -> None:
    inspect_model(EngineConfig(model=checkpoints(late_interaction.pylate_modernbert)), check=True)
    assert not [one for one in caplog.records if one.name.startswith("sentence_transformers")]
