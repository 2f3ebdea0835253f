"""Checkpoints that cannot be served exactly are refused at load, with what is wrong by name."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from tokenizers import Tokenizer

from maxsimd.engine import Engine, EngineConfig, ModelLoadError, RequestFailedError
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.checkpoint.detect import SUPPORTED
from maxsimd.engine.checkpoint.files import VOCABULARIES, damage_of, find_file, refuse_damaged_files
from maxsimd.engine.checkpoint.recipe_store import texts_content
from tests.checkpoints import (
    adapters,
    bi_encoders,
    cross_encoders,
    gguf_models,
    gte,
    jina,
    language_models,
    late_interaction,
    nomic,
    quantized,
    retrained,
    sparse_encoders,
    t5,
    two_towers,
    vision_language,
)
from tests.checkpoints.shared import SharedCheckpoints
from tests.checkpoints.tokenizers import WORDS
from tests.parity import changes
from tests.parity.changes import OF_ALL, Build, Edit, added, refusal, removed, settings, tensors, written
from tests.parity.conftest import Changed
from tests.parity.families import FAMILIES, LISTWISE, Family
from tests.parity.selection import families, with_default

Case = tuple[Build, Edit | None, dict[str, Any], str]  # with options, and what is said


def _pooled_by_mean(folder: Path) -> None:
    (pooling,) = folder.glob("*_Pooling/config.json")
    said = json.loads(pooling.read_text(encoding="utf-8"))
    mean = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    pooling.write_text(json.dumps(said | ({"pooling_mode": "mean"} if "pooling_mode" in said else mean)))


def _module_of_its_own(folder: Path) -> None:
    """Moves the transformer's files, so that nothing takes voyage's projection from there."""
    inside = folder / "0_Transformer"
    inside.mkdir()
    apart = {"modules.json", "config_sentence_transformers.json"}
    for file in [each for each in folder.iterdir() if each.is_file() and each.name not in apart]:
        file.rename(inside / file.name)
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    modules[0]["path"] = inside.name
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")


def _without_dense(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([each for each in modules if each["path"] != "1_Dense"]))


def _in_place(file: str, old: str, new: str) -> Edit:
    def edit(folder: Path) -> None:
        path = next(folder.glob(file))
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    return edit


def _pictures_moved(folder: Path) -> None:
    template = "additional_chat_templates/*.jinja"
    _in_place(template, "<Document>:{{ parts(message) }}", "<Document>:")(folder)
    _in_place(template, "<Query>:", "{% set d = messages[-1] %}{{ parts(d) }}<Query>:")(folder)


def _both(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]


def _layer(what: Any) -> Edit:
    return lambda folder: torch.save(what, folder / "sparse_linear.pt")


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this must never be run",)


# Settings of published encoders that would change what they compute.
_CODE_OF_ITS_OWN: list[Case] = [
    (build, settings(**{name: value}), {}, f"this checkpoint .*{word or name}")
    for build, name, value, word in [
        (gte.multilingual, "position_embedding_type", "absolute", ""),
        (gte.multilingual, "layer_norm_type", "rms_norm", ""),
        (gte.multilingual, "logn_attention_scale", True, ""),
        (gte.multilingual, "pack_qkv", False, ""),
        (sparse_encoders.opensearch_v3_gte, "hidden_act", "relu", ""),
        (gte.multilingual, "rope_scaling", {"type": "dynamic", "factor": 2.0}, "rotary"),
        (gte.multilingual, "rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 0.75}, "rotary"),
        (jina.reranker_v2, "position_embedding_type", "relative", ""),
        (jina.reranker_v2, "pad_vocab_size_multiple", 64, ""),
        (jina.reranker_v2, "hidden_act", "relu", ""),
        (jina.reranker_v2, "lora_adaptations", ["a"], ""),
        (jina.embeddings_v2, "feed_forward_type", "original", ""),
        (jina.embeddings_v2, "is_decoder", True, ""),
        (nomic.v2_moe, "moe_normalize_expert_weights", True, ""),
        (nomic.v2_moe, "num_shared_experts", 1, ""),
        (nomic.v2_moe, "mlp_fc1_bias", False, ""),
        (nomic.v2_moe, "rotary_scaling_factor", 2.0, ""),
        (bi_encoders.nomic, "rotary_emb_fraction", 0.5, ""),
        (bi_encoders.nomic, "activation_function", "geglu", ""),
    ]
]

_RETRAINED: list[Case] = [
    *[(retrained.bge_minicpm, None, {"cutoff_layer": i}, "scores behind the layers 2 to 4") for i in (1, 5)],
    (cross_encoders.bert, None, {"cutoff_layer": 2}, "cutoff_layer is for"),
    *[(build, None, {"score_type": kind}, "can be a cross-encoder alone")
      for build in (retrained.bge_minicpm, retrained.nemotron_rerank)
      for kind in ("bi-encoder", "late-interaction")],
    (retrained.bge_minicpm, settings(head_type="complex"), {}, "a simple head"),
    (retrained.bge_minicpm, settings(head_multi=False), {}, "a simple head"),
    (retrained.bge_minicpm, settings(rope_scaling={"type": "linear", "factor": 2.0}), {}, "rotary"),
    (retrained.bge_minicpm, settings(start_layer=1), {}, r"other scores.*lm_head\.3"),
    (retrained.bge_gemma2, settings(layer_wise=False), {}, "a head for each layer"),
    (retrained.bge_gemma2, settings(layer_sep=2), {}, r"other scores.*lm_head\.2"),
    (retrained.nemotron_rerank, settings(pooling="weighted_avg"), {}, "pools by weighted_avg"),
    (retrained.voyage_4_nano, settings(num_labels=64), {}, r"linear\.weight is \[192, 128\]"),
    (retrained.voyage_4_nano, _module_of_its_own, {}, r"linear\.weight"),
    (bi_encoders.sgpt, settings(is_causal=False), {}, "both directions"),
    (bi_encoders.mpnet, settings(is_causal=True), {}, "says that it is causal"),
    (language_models.qwen3_reranker, settings(is_causal=False), {}, "no next word"),
    *[(build, edit(name), {}, re.escape(name))
      for build, name in (
          (retrained.voyage_4_nano, "linear.weight"),
          (retrained.bge_minicpm, "lm_head.1.linear_head.weight"),
          (retrained.nemotron_rerank, "score.weight"))
      for edit in (changes.dropped, changes.not_finite)],
    (retrained.jina_v5_small, lambda folder: shutil.rmtree(folder / "adapters" / "retrieval"), {},
     "without adapters/retrieval/"),
    (cross_encoders.bert, None, {"compress_ratio": 2}, "trained with token compression"),
    (retrained.bge_minicpm, None, {"compress_layers": "2"}, "trained with token compression"),
    *[(retrained.bge_gemma2, None, {"compress_ratio": 2, **options}, message)
      for options, message in (
          ({"compress_ratio": 1, "compress_layers": "2"}, "no effect with compress_ratio=1"),
          ({"compress_layers": "2,4"}, "behind the layers 1 to 3"),
          # The layer that FlagEmbedding takes by default.
          ({}, "no layer follows the layer 8"),
          ({"compress_layers": "2,3", "cutoff_layer": 2}, "of the layers 2, 3 none is before the layer 2"),
          ({"compress_layers": "2", "score_template": "{{ query }} {{ document }}"},
           "leave out score_template"))],
]  # fmt: skip

_LANGUAGE_MODELS: list[Case] = [
    (cross_encoders.bert, None, {"instruction": "c"}, "takes no instruction"),
    *[(language_models.qwen3_reranker, None, {"score_template": template}, message)
      for template, message in (
          ("{{ query }} only", "no place for the document"),
          ("{{ document }}", "no place for the query"),
          ("{% if %}{{ query }}", "cannot be rendered"),
          ("no-such-file", "neither Jinja nor a file"))],
    (language_models.qwen3_reranker, settings(architectures=["Exaone4ForCausalLM"]), {},
     r"Qwen/Qwen3-Reranker-0\.6B"),
    (language_models.qwen3_reranker, settings(auto_map={"AutoConfig": "modeling_zeranker.ZEConfig"}), {},
     "code of its own, which may .* or give score_template if it answers yes or no"),
    (t5.mt5, _in_place("tokenizer.json", '"\u2581yes"', '"\u2581sim"'), {}, "no token .\u2581yes."),
]  # fmt: skip

_SPARSE: list[Case] = [
    (bi_encoders.bge, None, {"score_type": "sparse"}, "or name a SparseEncoder save"),
    (sparse_encoders.splade, None, {"dimensions": 8}, "dimensions is for vectors"),
    # An encoder that sentence-transformers would turn into a sparse one, with random weights.
    (bi_encoders.bge, settings("config_sentence_transformers.json", model_type="SparseEncoder"), {},
     "a masked language model with SpladePooling is supported"),
    (bi_encoders.bge, None, {"score_type": "hybrid"}, "has no colbert_linear and sparse_linear"),
    (bi_encoders.bge_m3, None, {"hybrid_weights": "1,1,1"}, "hybrid_weights is for hybrid scores"),
    *[(bi_encoders.bge_m3, None, {"score_type": kind}, "allow_pickle=True")
      for kind in ("sparse", "hybrid", "late-interaction")],
    *[(bi_encoders.bge_m3, _both(changes.converted, removed("*.pt"), removed("colbert_linear.*")),
       {"score_type": kind}, "has no colbert_linear")
      for kind in ("hybrid", "late-interaction")],
    (bi_encoders.bge_m3, _pooled_by_mean, {"allow_pickle": True}, "pools mean"),
    *[(bi_encoders.bge_m3, _layer(what), {"allow_pickle": True}, message)
      for what, message in (
          (Harmful(), "cannot read sparse_linear.pt"),
          ({"weight": torch.ones(1, 128)}, "not a weight and a bias"),
          ({"weight": torch.ones(2, 128), "bias": torch.ones(2)}, "not a weight and a bias"),
          ({"weight": torch.ones(1, 64), "bias": torch.ones(1)}, "not a weight and a bias"),
          ({"weight": torch.full((1, 128), torch.nan), "bias": torch.ones(1)}, "not finite"))],
]  # fmt: skip

_PICTURES: list[Case] = [
    *[(vision_language.qwen3_vl_embedding, settings("sentence_bert_config.json", processing_kwargs=said),
       {}, message)
      for said, message in (
          ({"image": {"patch_size": 8}}, "the setting patch_size for pictures, which is not known here"),
          ({"text": {"max_length": 90}, "chat_template": {"restore_suffix": False}},
           "texts truncated without what the template writes behind them are not supported"))],
    # The query's picture cannot be told from the document's then.
    (vision_language.qwen3_vl_reranker, _pictures_moved, {}, "the chat template"),
    (vision_language.colqwen2_merged,
     tensors(lambda found: found.update({name: each + 0.5 for name, each in found.items()}),
             "1_Dense/model.safetensors"), {}, "modules with another projection than its custom_text_proj"),
    (vision_language.colqwen2_merged, _without_dense, {}, "no module for its projection custom_text_proj"),
    *[(build, None, {"score_type": kind}, "which can be a bi-encoder alone")
      for build in (two_towers.clip, two_towers.siglip)
      for kind in ("late-interaction", "cross-encoder")],
]  # fmt: skip

_W8A8 = partial(quantized.qwen3_reranker, scheme="w8a8")
_DOWN = "model.layers.0.mlp.down_proj"


def _quantized(**said: Any) -> Edit:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        settings(quantization_config=config["quantization_config"] | said)(folder)

    return edit


def _weights(**said: Any) -> Edit:
    def edit(folder: Path) -> None:
        groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
        groups["group_0"]["weights"] |= said
        _quantized(config_groups=groups)(folder)

    return edit


_QUANTIZED: list[Case] = [
    (_W8A8, edit, {}, message)
    for edit, message in [
        *[(_quantized(quant_method=method), f"quantized by {method}, which is not supported; name the")
          for method in ("gptq", "awq", "bitsandbytes", "mxfp4", "quark")],
        *[(_quantized(format=form), f"format '{form}'") for form in ("marlin-24", "nvfp4-pack-quantized")],
        (_quantized(sparsity_config={"format": "sparse-24-bitmask"}), r"weights \(sparse-24-bitmask\)"),
        (_quantized(quantization_status="frozen"), "that are frozen, not compressed"),
        (_quantized(kv_cache_scheme={"num_bits": 8}), "compressed-tensors with kv_cache_scheme"),
        (_quantized(transform_config={"config_groups": {"u": {}}}), "-tensors with transform_config"),
        (_quantized(format="float-quantized"), r"float-quantized of \['int'\] with \[8\] bits"),
        (_quantized(format="pack-quantized"), "lacks weight_packed"),
        (_quantized(quant_method="fp8", config_groups={}, format="e5m2", fmt="e5m2"), "fp8 with format"),
        (_weights(strategy="tensor_group"), "by 'tensor_group'"),
        (_weights(num_bits=3), r"with \[3\] bits"),
        (_weights(strategy="group", group_size=48), r"has scales \[128, 1\], which do not fit"),
        (_weights(symmetric=False), "has no zero point"),
        (_weights(dynamic=True), "compressed-tensors with dynamic"),
        (changes.dropped(f"{_DOWN}.weight_scale"),
         f"{_DOWN}.weight of .* is torch.int8, but has no scale beside it"),
        (added(f"{_DOWN}.weight_scale", torch.ones(3, 1)), r"has scales \[3, 1\], which do not fit"),
        (added("model.layers.0.self_attn.k_scale", torch.ones(1)), "unexpected: .*self_attn.k_scale"),
        (added(f"{_DOWN}.output_scale", torch.ones(1)), "unexpected: .*down_proj.output_scale")]
]  # fmt: skip

_LORA = "adapter_config.json"
_MATRICES = "adapter_model.safetensors"
_Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def _as_matrices_of(layer: str) -> Edit:
    def add(found: changes.Tensors) -> None:
        for half in ("lora_A", "lora_B"):
            found[f"base_model.model.{layer}.{half}.weight"] = found[f"{_Q_PROJ}.{half}.weight"].clone()

    return tensors(add, _MATRICES)


_ADAPTERS: list[Case] = [
    *[(vision_language.colqwen2_5_adapter, edit, {}, message)
      for edit, message in [
          (settings(_LORA, peft_type="IA3"), "is no LoRA; merge it into its base"),
          (settings(_LORA, use_dora=True), r"lacks matrices: model.layers.0.mlp.down_proj, "),
          (settings(_LORA, modules_to_save=["score"]), "has no tensors of its modules_to_save, score"),
          (settings(_LORA, rank_pattern={"q_proj": 3}), "its rank is 3; its matrices have another"),
          (settings(_LORA, r=8), "its rank is 8; its matrices have another"),
          (settings(_LORA, rank_pattern={"(": 3}), "has patterns that cannot be read"),
          (settings(_LORA, base_model_name_or_path="/nowhere"), "the base '/nowhere' of the adapter"),
          *[(settings(_LORA, **{name: value}), f"sets {name}, with which it cannot be added here")
            for name, value in {
                "target_parameters": ["w"], "lora_bias": True, "alora_invocation_tokens": [1],
                "layer_replication": [[0, 2]], "init_lora_weights": "pissa", "bias": "some"}.items()],
          (written(_LORA, "{"), "adapter_config.json of .* is not JSON"),
          (removed(_MATRICES), "has no adapter_model.safetensors"),
          (tensors(dict.clear, _MATRICES), "lacks matrices: it has none"),
          (_as_matrices_of("other"), "is for other, which the model does not have"),
          (_as_matrices_of("q_proj"), r"may mean \S+q_proj or \S+q_proj"),
          (changes.not_finite(f"{_Q_PROJ}.lora_A.weight", _MATRICES), "not finite in its tensor .*lora_A"),
          (changes.dropped(f"{_Q_PROJ}.lora_B.weight", _MATRICES),
           "lacks matrices: .*layers.0.self_attn.q_proj"),
          (added(f"{_Q_PROJ}.lora_B.weight", torch.zeros(7, 4), _MATRICES),
           r"has matrices \[7, 4\] and \[4, 128\] for .*, which is \[128, 128\]"),
          (added(f"{_Q_PROJ}.lora_magnitude_vector", torch.zeros(4), _MATRICES),
           "has a tensor .*lora_magnitude_vector, which is not of LoRA")]],
    *[(partial(adapters.bert, **adapters.SETTINGS["a classifier and a bias"]),
       added(f"base_model.model.{name}", torch.ones(shape), _MATRICES), {}, message)
      for name, shape, message in (
          ("classifier.weight", (2, 128), r"has \[2, 128\] .* classifier.weight, which is \[1, 128\]"),
          ("classifier.other", (2,), "in place of classifier.other, which is None"),
          ("bert.embeddings.LayerNorm.weight", (128,), "tensor .*LayerNorm.weight, which is not of LoRA"))],
]  # fmt: skip

_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 133466304\n"
_SECOND = "model-00002-of-00002.safetensors"
_ADAPTER = partial(adapters.bert, **adapters.SETTINGS["a classifier and a bias"])


def _pickled(content: bytes) -> Edit:
    return _both(removed("*.safetensors"), lambda folder: (folder / "pytorch_model.bin").write_bytes(content))


def _sentencepiece_alone(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "spiece.model").write_bytes(b"\n\x0e\n\x05<unk>")


def _bytes_last(folder: Path) -> None:
    last = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    template = json.loads((folder / "tokenizer.json").read_text())["post_processor"]
    steps = {"type": "Sequence", "processors": [template, last]}
    settings("tokenizer.json", post_processor=steps)(folder)


def _one_level_down(folder: Path) -> None:
    shutil.copytree(folder, folder / "checkpoint-500")
    (folder / "config.json").unlink()


_BERT = cross_encoders.bert
_WHOLE = "model.safetensors"

# Faults of files, and the words of the message about the name, the cause and the remedy.
_DAMAGED: list[Case] = [
    *[(build, changes.in_place_of(file, _POINTER), {}, f"{name} of .* Git LFS pointer.*`git lfs pull`")
      for build, file, name in (
          *((_BERT, name, name) for name in (_WHOLE, "config.json", "tokenizer.json")),
          (bi_encoders.bge, "modules.json", "modules.json"),
          (late_interaction.pylate_modernbert, "1_*/model.safetensors", "1_Dense/model.safetensors"),
          (_ADAPTER, _MATRICES, _MATRICES))],
    *[(_BERT, _both(changes.sharded, edit), {}, f"{_SECOND} of .*{message}")
      for edit, message in (
          (changes.in_place_of(_SECOND, _POINTER), "`git lfs pull`"),
          (changes.cut_short(_SECOND),
           r"is damaged or cut short at \d+ bytes: .* not fully covered; download it again"),
          (changes.in_place_of(_SECOND, b""), "is empty; download it again"),
          (removed(_SECOND), "is not there, .* download it again"))],
    *[(_BERT, _pickled(content), {"allow_pickle": True}, f"pytorch_model.bin of .*{message}")
      for content, message in (
          (_POINTER, "`git lfs pull`"),
          (b"PK and no more", "not a torch archive; download it again"))],
    (_BERT, changes.in_place_of(_WHOLE, b"<html>Not found</html>"), {},
     f"{_WHOLE} of .* is damaged or cut short at 22 bytes: .*; download it"),
    (_BERT, changes.cut_short("tokenizer.json"), {},
     "tokenizer.json of .* is not JSON: .*; download it again"),
    (_BERT, changes.in_place_of("tokenizer_config.json", b""), {},
     "tokenizer_config.json of .* is empty; download"),
    (_BERT, changes.without_settings("model_type"), {},
     'config.json of .* no model_type; add "model_type": "bert"'),
    (bi_encoders.bge, removed("1_Pooling/config.json"), {},
     "has no 1_Pooling/config.json with the settings of the Pooling .* download the whole checkpoint again"),
    (bi_encoders.bge, settings("config_sentence_transformers.json", prompts=None), {},
     "prompts in config_sentence_transformers.json of .* not null; remove the key"),
    (t5.monot5, _sentencepiece_alone, {},
     "tokenizer only as spiece.model.*pip install sentencepiece protobuf, or save a tokenizer.json"),
    *[(_BERT, removed("*.safetensors"), {"allow_pickle": allowed},
       f"has no weights: there is neither {_WHOLE} nor .* download it whole")
      for allowed in (False, True)],
    (bi_encoders.bge, settings("config_sentence_transformers.json", prompts={"query": ["a"]}), {},
     r"sets prompts\.query to \[\"a\"\], .* as one string"),
    *[(bi_encoders.bge, _in_place("modules.json", old, new), {}, message)
      for old, new, message in (
          ('"type"', '"kind"', "modules.json of .* gives its module 0 no type"),
          ("transformer.Transformer", "bow.BoW", "modules.json of .* begins with a BoW, not a transformer"),
          ('"path": ""', '"path": "0_Gone"', "has no 0_Gone/config.json with the settings of the Tr"))],
    (partial(bi_encoders.bert, behind="a residual"), removed("*_Dense/*.safetensors"), {},
     "has no 2_Dense/model.safetensors with the weights of the Dense"),
    *[(_BERT, settings("tokenizer_config.json", **{key: value}), {}, message)
      for key, value, message in (
          ("model_max_length", "512", 'tokenizer_config.json of .* to "512"; give a number'),
          ("tokenizer_class", "XLMRobertaTokenizer", "its tokenizer cannot be read .* tokenizer_conf"))],
    *[(_BERT, written(file, text), {}, rf"{re.escape(file)} of .* {message}")
      for file, message, texts in (
          (f"{_WHOLE}.index.json", "has no map of weights", ("[]", "{", '{"weight_map": 3}', "{}")),
          (f"{_WHOLE}.index.json", "names .* no safetensors file",
           [json.dumps({"weight_map": {"a": file}})
            for file in ("pytorch_model.bin", f"../{_WHOLE}", f"folder/{_WHOLE}")]),
          ("config.json", "is not JSON: Expecting property name", ("{",)),
          ("config.json", "is not JSON: maximum recursion depth", ("[" * 100_000,)),
          ("config.json", "is no JSON object", ("[1]",)),
          ("config.json", "has no model_type", ('{"architectures": 5}',)),
          ("config_sentence_transformers.json", "is no", ('"x"',)),
          ("modules.json", "is no list of modules", ("[3]", '{"0": {}}')))
      for text in texts],
    *[(_BERT, written("modules.json", json.dumps([{"name": "0", "path": path, "type": "x"}])), {},
       "has a module in .*, outside of its own folder")
      for path in ("../other", "/other", "a/../../b")],
    (_BERT, _both(_pickled(b"\x80\x02 and more"), settings(hidden_act="no")), {"allow_pickle": True},
     "config.json sets hidden_act to 'no', which"),
    (cross_encoders.modernbert, changes.without_settings("pad_token_id"), {},
     "a pad_token_id beyond its vocab_size"),
    (_BERT, lambda folder: (folder / _WHOLE).rename(folder / "Model.safetensors"), {},
     f"has no {_WHOLE}, but Model.safetensors; rename"),
    (_BERT, tensors(lambda found: found.update({f"module.{name}": found.pop(name) for name in [*found]})), {},
     "their names begin with 'module.': save the model without it"),
    (_BERT, _one_level_down, {}, "no checkpoint at .* name its folder checkpoint-500"),
    (_ADAPTER, settings(_LORA, base_model_name_or_path="/gone/base"), {},
     "the base '/gone/base' of the adapter .* no folder '/gone/base'; put it there, or name .* in adapter_"),
    (_ADAPTER, settings(_LORA, base_model_name_or_path=None), {},
     "adapter_config.json of .* names no base; set base_model_name_or_path"),
]  # fmt: skip

_MODULES, _TWICE = cross_encoders.scored_by_modules, "{{ messages[0].content }} {{ messages[0].content }}"
_TRANSFORMER = "sentence_transformers.models.Transformer"
_RESIDUAL = partial(bi_encoders.bert, behind="a residual")
_SETTINGS: list[Case] = [
    (_BERT, None, {"score_label": "yes"}, "for classifiers of several labels"),
    (partial(_BERT, labels=2), None, {"score_label": "yes"}, "one of: LABEL_0, LABEL_1"),
    (late_interaction.pylate_modernbert, _without_dense, {}, "modules.json .* would add a random one"),
    (late_interaction.stanford,
     _both(written("modules.json", json.dumps([{"name": "0", "path": "", "type": _TRANSFORMER}])),
           written(OF_ALL, '{"query_prefix": ""}')), {}, "no module for its projection linear"),
    # Adapters are woven into its weights, and its code is not run.
    (late_interaction.jina_colbert_v2, settings(lora_adaptations=["retrieval.query"]), {},
     "jina-embeddings-v3-hf"),
    *[(bi_encoders.gte, None, options, message)
      for options, message in (
          ({"score_type": "cross-encoder"}, "no classifier"),
          ({"dimensions": 1000}, "dimensions=1000 is more"),
          ({"doc_token_pooling": 2.0, "score_type": "bi-encoder"}, "late interaction"),
          ({"score_template": "{{ query }} {{ document }}"}, "query and document together"))],
    (partial(_BERT, labels=2), settings(id2label={"0": "x", "1": "x"}), {"score_label": "x"}, "'x' twice"),
    (late_interaction.native, settings("1_Dense/config.json", activation_function="mypkg.Act"), {},
     r"1_Dense/config\.json .*'mypkg\.Act'.*trust_remote_code"),
    (_BERT, settings(sbert_ce_default_activation_function="mypkg.Act"), {}, r"config\.json .*'mypkg\.Act'"),
    (_BERT, settings(num_hidden_layers=10**6), {}, "config.json of .* num_hidden_layers to 1,000,0"),
    (_MODULES, settings(OF_ALL, activation_fn="transformers.activations.No"), {},
     "activations.No', which cannot be imported"),
    (bi_encoders.gte, changes.reads(stride=4), {}, r"processing_kwargs\.text\.stride to 4"),
    (bi_encoders.gte, changes.reads(truncation="only_second"), {}, r"truncation to 'only_second'"),
    (bi_encoders.gte, settings("sentence_bert*", query_expansion={"strategy": "fixed", "length": 8}), {},
     "query_expansion, which is for late interaction"),
    (partial(bi_encoders.bert, behind="a layer norm"), None, {"score_type": "late-interaction"},
     "LayerNorm for pooled vectors"),
    (language_models.zerank_2, settings("*_LogitScore/config.json", false_token_id=True), {},
     "true_token_id and false_token_id; give token ids"),
    (t5.monot5, written("modules.json", json.dumps([
        {"name": "0", "path": "", "type": _TRANSFORMER}, {"name": "1", "path": "1", "type": "LogitScore"}])),
     {"score_type": "cross-encoder"}, "do not fit T5ForSequenceClassification"),
    (_MODULES, settings("4_Dense/config.json", module_output_name="logits"), {}, "last module gives no sc"),
    (_MODULES, settings("2_Dense/config.json", module_input_name="token_embeddings"), {},
     "sets module_input_name to 'token_embeddings'"),
    (_RESIDUAL, settings("*_Dense/config.json", module_output_name="scores"), {},
     "sets module_output_name to 'scores'"),
    (bi_encoders.qwen3_in_chat, written("chat_template.jinja", _TWICE), {}, "chat template"),
    (bi_encoders.gte, added("linear.weight", torch.ones(2, 128)), {}, r"unexpected: linear.weight; .*HF_C"),
    *[(build, edit, {}, f"{message}.*, which is not supported; leave it out")
      for build, edit, message in (
          (bi_encoders.gte, settings("tokenizer_config.json", split_special_tokens=True),
           "sets split_special_tokens to true"),
          (bi_encoders.gte, settings(position_embedding_type="relative_key"),
           'position_embedding_type to "rel'),
          (bi_encoders.gte, settings("sentence_bert*", tokenizer_name_or_path="a"), "tokenizer_name_or"),
          (late_interaction.stanford, settings("artifact.metadata", similarity="l2"), 'similarity to "l2"'),
          *((build, settings(chunk_size_feed_forward=4), "chunk_size_feed_forward to 4")
            for build in (jina.reranker_v2, cross_encoders.electra)))],
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        *_CODE_OF_ITS_OWN, *_RETRAINED, *_LANGUAGE_MODELS, *_SPARSE, *_PICTURES, *_QUANTIZED, *_ADAPTERS,
        *_DAMAGED, *_SETTINGS],
    ids=lambda case: case[3],
)  # fmt: skip
def test_it_says_in_one_line_what_is_wrong_and_what_to_do(
    case: Case, checkpoints: SharedCheckpoints, changed: Changed, capfd: pytest.CaptureFixture[str]
) -> None:
    build, edit, options, message = case
    said = refusal(checkpoints(build) if edit is None else changed(build, edit), **options)
    assert re.search(message, said), said
    assert "\n" not in said
    assert "never be run" not in capfd.readouterr().out


def test_a_damaged_file_that_nobody_reads_does_no_harm(changed: Changed) -> None:
    path = Path(changed(_BERT, written("results.json", ""), written("pytorch_model.bin", _POINTER.decode())))
    for file in ("onnx/config.json", "old/config.json", "checkpoint-500/model.safetensors"):
        (path / file).parent.mkdir()
        (path / file).write_bytes(_POINTER)
    load_model(EngineConfig(model=str(path)), changes.CPU)


def test_folders_that_are_read_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "query_0").mkdir()
    (tmp_path / "query_0" / "config.json").write_bytes(_POINTER)
    (tmp_path / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Router"}]')
    (tmp_path / "router_config.json").write_text('{"types": {"gone_0": "a", "query_0": "b"}}')
    assert find_file(str(tmp_path), "/modules.json", None) == tmp_path / "modules.json"
    with pytest.raises(ModelLoadError, match=r"^query_0/config.json of .* Git LFS pointer"):
        refuse_damaged_files(str(tmp_path))
    (tmp_path / "router_config.json").unlink()
    shutil.rmtree(tmp_path / "query_0")
    for folder in ("lost+found", "old"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_bytes(_POINTER)
    listed = Path.iterdir

    def listing(path: Path) -> Iterator[Path]:
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", listing)
    refuse_damaged_files(str(tmp_path))
    assert "old/config.json of" in str(damage_of(str(tmp_path)))


_GGUF: list[tuple[Build, str]] = [
    (partial(gguf_models.qwen3_reranker, **{"classifier.output_labels": ["no", "yes"]}),
     r"answers with \['no', 'yes'\]"),
    (partial(gguf_models.qwen3, **{"rope.scaling.type": "yarn"}), "scales positions by 'yarn'"),
    (partial(gguf_models.qwen3, **{"expert_count": 8}), "sets qwen3.expert_count, which is not"),
    (partial(gguf_models.qwen3, **{"attention.causal": False}), "attends both ways"),
    (partial(gguf_models.qwen3, **{"attention.value_length": 64}), "another qwen3.attention.value"),
    (partial(gguf_models.qwen3, **{"tokenizer.ggml.pre": "llama-bpe"}),
     "no tokenizer that is proven right: .*'llama-bpe'.*put the tokenizer.json"),
    (partial(gguf_models.qwen3, **{"split.count": 2}), "join them with llama-gguf-split"),
    (partial(gguf_models.qwen3, kind="Q4_1"), "as Q4_1; name a version whose weights are F32, F16"),
    (partial(gguf_models.qwen3_embedding, **{"tokenizer.ggml.add_eos_token": None}),
     "does not say whether a token ends texts"),
    (partial(gguf_models.bge, pooling_type=0), "does not say how it pools .* put the modules.json"),
    (partial(gguf_models.bge, pooling_type=4), "has left out a part of its classifier"),
    (partial(gguf_models.bge, **{"attention.causal": True}), "not said to attend both ways"),
    (partial(gguf_models.bge, block_count=4), "missing: encoder.layer.3"),
    (partial(gguf_models.bge, feed_forward_length=128), r"wrongly shaped: encoder.layer.0.intermediate"),
    (partial(gguf_models.bge, block_count=2), "has tensors that a bert is not read .*: blk.2"),
    (partial(gguf_models.llama, more={"rope_freqs.weight": torch.ones(32)}),
     "scales positions as Llama 3.1 does"),
    (partial(gguf_models.llama, more={"blk.0.attn_sinks.weight": torch.ones(4)}),
     "tensors that a llama is not read with here: blk.0.attn_sinks"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), _GGUF)
def test_a_gguf_file_that_says_something_else_is_refused(build: Build, message: str, tmp_path: Path) -> None:
    assert re.search(message, refusal(build(tmp_path), dtype="float32"))


def test_what_stands_beside_a_gguf_file_is_compared(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    model = Path(shutil.copy(checkpoints(gguf_models.qwen3), tmp_path / "a.gguf"))
    other = Path(checkpoints(gguf_models.bge_reranker)).parent
    shutil.copy(other / "tokenizer.json", tmp_path / "tokenizer.json")
    assert re.search(r"the tokenizer.json beside .* is another model's: its token 0", refusal(tmp_path))
    shutil.copy(model, tmp_path / "b.gguf")
    assert "has 2 GGUF files (a.gguf, b.gguf); name one of them" in refusal(tmp_path)
    embedder = Path(gguf_models.qwen3_embedding(tmp_path / "embedder"))
    (embedder.parent / "config.json").write_text('{"is_causal": false}', encoding="utf-8")
    assert "reads in both directions" in refusal(embedder)
    (embedder.parent / "modules.json").write_text('["a"]', encoding="utf-8")
    assert texts_content(EngineConfig(model=str(embedder))) is None


def test_a_file_that_is_no_such_gguf_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gguf_models, "_TYPED", ["<|rerank_token|>"])
        of_jina = gguf_models.qwen3(tmp_path / "jina-reranker-v3")
    assert "whose projection a GGUF file does not have; name jina" in refusal(of_jina)
    (tmp_path / "some.gguf").write_bytes(b"GGUF and nothing more")
    assert "cannot be read as a GGUF file" in refusal(tmp_path / "some.gguf")
    assert "there is no file '/nowhere/some.gguf'" in refusal("/nowhere/some.gguf")
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = refusal(tmp_path / "mamba.gguf")
    assert re.search(r"is a .mamba.; of GGUF files bert, gemma, llama, qwen2, qwen3", said)
    path = Path(gguf_models.bge(tmp_path / "bge", kind="F32"))
    reader = gguf.GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "token_embd_norm.weight").data[0] = np.nan
    reader.data.flush()
    assert "not finite in its tensor embeddings.LayerNorm.weight" in refusal(path, dtype="float32")


def test_what_is_missing_is_said(checkpoints: SharedCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    can, file, bert, qwen3 = os.access, "tokenizer.json", checkpoints(_BERT), checkpoints(gguf_models.qwen3)
    monkeypatch.setattr(os, "access", lambda path, mode: file not in str(path) and can(path, mode))
    assert re.search(r"/tokenizer.json cannot be read: permission denied; .*\(chmod\)", refusal(bert))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install '.[gguf]'" in refusal(qwen3)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert re.search("'some/model' is not a folder; .* set HOME or HF_HOME", refusal("some/model"))


def test_half_of_an_adapters_base_is_refused(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    path = checkpoints(partial(adapters.bert, **adapters.SETTINGS["a classifier and a bias"]))
    adapters.without_classifier(Path(path), tmp_path / "adapter", tmp_path / "base")
    changes.dropped("base_model.model.classifier.bias", _MATRICES)(tmp_path / "adapter")
    assert "missing: classifier.bias" in refusal(tmp_path / "adapter")
    tied, adapter = Path(checkpoints(language_models.qwen3_reranker)), tmp_path / "tied"
    size = load_file(tied / "model.safetensors")["model.embed_tokens.weight"].shape
    adapter.mkdir()
    matrices = {"lora_A": torch.zeros(4, size[1]), "lora_B": torch.zeros(size[0], 4)}
    named = {f"base_model.model.lm_head.{name}.weight": each for name, each in matrices.items()}
    save_file(named, adapter / _MATRICES)
    said = {"peft_type": "LORA", "base_model_name_or_path": str(tied), "r": 4, "lora_alpha": 8}
    (adapter / _LORA).write_text(json.dumps(said))
    assert "is for lm_head, whose weights are also another layer's" in refusal(adapter)


def test_two_sparse_are_refused(splade: str, changed: Changed, tmp_path: Path) -> None:
    routes = [list(SparseEncoder(splade, device="cpu")) for _ in range(2)]
    router = Router.for_query_document(query_modules=routes[0], document_modules=routes[1])
    SparseEncoder(modules=[router], device="cpu").save_pretrained(str(tmp_path / "two"))
    assert "by two models" in refusal(tmp_path / "two")
    path = changed(sparse_encoders.opensearch_v3)
    static = Path(path) / "query_0_SparseStaticEmbedding"
    torch.save({"weight": torch.ones(WORDS)}, static / "pytorch_model.bin")
    (static / "model.safetensors").unlink()
    assert "allow_pickle" in refusal(path)


@pytest.mark.parametrize(
    ("build", "edit", "options", "message"),
    [
        *((build, None, {"dtype": "float16"}, r"leave the range of float16.*use bfloat16 or float32")
          for build in (t5.monot5, bi_encoders.embeddinggemma)),
        (sparse_encoders.splade, None, {"cache_precision": "int8"}, "would round the ids of words"),
        (cross_encoders.qwen3_in_chat, written("chat_template.jinja", "{{ messages[0].content }}"), {},
         "does not read a pair: .*'document' content does not reach .*; check its configuration$"),
        (bi_encoders.gte,
         _both(settings("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast"), _bytes_last), {},
         "tokenizer.json .* put TemplateProcessing last"),
        (cross_encoders.bert, added("classifier.weight", torch.full((1, 128), 1e38)), {}, "not finite")],
)  # fmt: skip
async def test_what_cannot_be_run_is_refused_by_the_engine(
    build: Build, edit: Edit | None, options: dict[str, Any], message: str, changed: Changed
) -> None:
    path = changed(build, *([] if edit is None else [edit]))
    with pytest.raises(ModelLoadError, match=message):
        async with Engine(EngineConfig(model=path, **{"dtype": "float32"} | options)):
            pass


async def test_a_text_that_gives_nan_is_named_with_the_precision(changed: Changed) -> None:
    path = Path(changed(bi_encoders.bge))
    zebra = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("zebra")
    tensors(lambda found: found["embeddings.word_embeddings.weight"][zebra].fill_(3e38))(path)
    said = "the model returned a number that is not finite in bfloat16; leave this text out, or load"
    async with Engine(EngineConfig(model=str(path), dtype="bfloat16", threads=1)) as engine:
        with pytest.raises(RequestFailedError, match=rf"^documents\[2\]: {said}"):
            await engine.score("a horse", ["a cat", "a dog", "a zebra", "a cat"])
        with pytest.raises(RequestFailedError, match=rf"^input\[1\]: {said}"):
            await engine.embed(["a cat", "a zebra"])
        reported = await engine.score("a horse", ["a cat", "a zebra"], on_error="report")
    assert reported.errors.keys() == {1}
    assert re.match(said, reported.errors[1])


def test_an_unknown_architecture_gets_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(kind: str, **more: Any) -> str:
        written("config.json", json.dumps({"model_type": kind} | more))(tmp_path)
        return refusal(tmp_path)

    monkeypatch.setitem(t5.SIZES, "d_model", 1152)
    assert "answer with other words" in refusal(t5.mt5(tmp_path / "wide"), dtype="float32")
    message = said("nothing", architectures=["NothingModel"])
    assert "NothingModel" in message
    assert all(name in message for row in SUPPORTED for name in row.architectures if name != "*")
    newer = said("newer", auto_map={"AutoModel": "modeling.NewModel"})
    assert re.search(r"(?s)(?=.*trust_remote_code=True)(?=.*'newer')", newer)
    monkeypatch.setattr("maxsimd.engine.checkpoint.library.CONFIG_MAPPING", {})
    here = f"transformers {re.escape(transformers.__version__)} does not"
    assert re.search(f"'gte', which {here} have", said("gte", architectures=["GteModel"], rope_theta=1e4))
    assert re.search(f"read as 'gte'; {here}.*newer", said("new", architectures=["NewModel"], auto_map={}))


# Checkpoints with code of their own: their tensor beside its names in transformers, which messages may use.
_RENAMED = {
    "encoder.layers.1.norm1.bias": ("layers.1.post_attention_layernorm.bias",
                                    "layer.1.attention.output.LayerNorm.bias"),
    "encoder.layer.1.attention.o_proj.bias": ("layers.1.self_attn.o_proj.bias",),
}  # fmt: skip

DAMAGES = {
    "renamed": changes.renamed, "missing": changes.dropped, "of another shape": changes.with_another_row,
    "with a NaN": changes.not_finite,
}  # fmt: skip

# One of each loader; `make test-all` takes all.
ONE_OF_EACH = (
    *("ColBERT", "any encoder", "BERT", "Qwen3-Reranker", "LogitScore", "nomic", "jina-reranker-v3"),
    *("Llama Nemotron Rerank", "bge-reranker-v2-minicpm-layerwise", "LFM2.5-ColBERT"),
)
_NAMED = {family.name: family for family in (*FAMILIES, LISTWISE)}


def _file_of_backbone(folder: Path) -> str:
    """At the root, in the first module's folder, or in that of a Router's model."""
    inside = [*folder.glob("0_*/*.safetensors"), *sorted(folder.glob("*Transformer/*.safetensors"))]
    files = (path for path in (folder / "model.safetensors", *inside) if path.is_file())
    return str(next(files).relative_to(folder))


@pytest.mark.parametrize("damage", with_default(DAMAGES, ("renamed", "with a NaN")))
@families(_NAMED.values(), ONE_OF_EACH)
def test_a_wrong_tensor_of_the_backbone_is_named(family: Family, damage: str, changed: Changed) -> None:
    path = Path(changed(family.build))
    file = _file_of_backbone(path)
    found = load_file(path / file).items()
    names = sorted(name for name, tensor in found if ".1." in name and tensor.dim() == 1)
    name = next((name for name in names if "norm" in name.lower() or "ln_" in name), names[0])
    DAMAGES[damage](name, file)(path)
    message = refusal(path, **family.settings)
    inner = name.split(".", 1)[1]  # without the prefix that a classifier's backbone has
    renamed = [ours for theirs, all_ours in _RENAMED.items() if theirs in name for ours in all_ours]
    assert any(part in message for part in (name, inner, *renamed)), message


@families(_NAMED.values(), ONE_OF_EACH)
def test_a_checkpoint_without_a_tokenizer_is_refused(family: Family, changed: Changed) -> None:
    path = changed(family.build, *(removed(f"**/{name}") for name in VOCABULARIES))
    assert "has no tokenizer" in refusal(path, **family.settings)


_BEHIND = [
    (name, file, tensor, damage)
    for name, file, tensor, damages in (
        ("native multi-vector", "1_*/model.safetensors", "linear.weight", [*DAMAGES]),
        ("GTE-ModernColBERT", "1_*/model.safetensors", "linear.weight", [*DAMAGES]),
        ("EmbeddingGemma", "2_*/model.safetensors", "linear.weight", [*DAMAGES]),
        ("ColBERT", "model.safetensors", "linear.weight", ["renamed", "with a NaN"]),
        ("jina-reranker-v3", "model.safetensors", "projector.2.weight", ["renamed", "missing", "with a NaN"]),
    )
    for damage in damages
]

_USUAL = [*_BEHIND[:4], *(each for each in _BEHIND if each[3] in ("renamed", "with a NaN"))]


@pytest.mark.parametrize(("name", "file", "tensor", "damage"), with_default(_BEHIND, _USUAL))
def test_last_tensors_are_named(name: str, file: str, tensor: str, damage: str, changed: Changed) -> None:
    path = Path(changed(_NAMED[name].build))
    (found,) = path.glob(file)
    DAMAGES[damage](tensor, str(found.relative_to(path)))(path)
    assert tensor.rsplit(".", 1)[0] in refusal(path)
