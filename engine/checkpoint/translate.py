"""Checkpoints that were published with code of their own, which is not run: their configs are translated for
the classes that run them here. A setting that those classes do not carry out is refused.

Sources: the model cards, and the code that the checkpoints come with."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file

from maxsimd.engine.checkpoint.detect import COST_WISE, JINA_V5, LLAMA_RERANKER, MINICPM
from maxsimd.engine.checkpoint.files import CheckpointFiles, folder_for, json_of, modules_in
from maxsimd.engine.checkpoint.weights import read_tensors, tensor_names
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.models.jina_bert import ACTIVATIONS, JinaBertConfig
from maxsimd.engine.models.registered import NomicMoeConfig, XLMRobertaFlashConfig

Config = dict[str, Any]


def runs_as(files: CheckpointFiles) -> Any:
    """The type of model that a config is read as. Raises ModelLoadError if it cannot be translated."""
    return translated_type(files.config)[0] if files.config_at_root else files.config.get("model_type")


def translated_type(config: Config) -> tuple[Any, bool]:
    """The type of model that a config.json is read as, and whether it is translated for that. Raises
    ModelLoadError if it cannot be."""
    translate = language_model_translation(config) or _translation(config)
    return (config if translate is None else translate(config)).get("model_type"), translate is not None


@contextmanager
def in_transformers_terms(
    model: str, revision: str | None, files: CheckpointFiles, trust_remote_code: bool
) -> Iterator[str]:
    """The path to load the checkpoint from: its own, or a temporary folder with links to its files and a
    config in transformers' terms. With `trust_remote_code` a checkpoint's own code reads it, except for
    retrained language models: our loaders need to see into those."""
    if not files.config_at_root:
        yield model
        return
    of_language_model = language_model_translation(files.config)
    is_ours = not trust_remote_code and _translation(files.config) is not None
    if of_language_model is None and not is_ours and not files.is_restated:
        yield model
        return
    source = downloaded(model, revision)
    config = files.config
    if of_language_model is not None or is_ours:
        translate = of_language_model or _translation(config, tensor_names(model, revision))
        assert translate is not None
        config = {name: value for name, value in translate(config).items() if name != "auto_map"}
    entries = [entry for entry in source.iterdir() if files.modules or entry.name != "modules.json"]
    with linked(model, entries, config) as folder:
        if of_language_model is not None:
            _write_modules_beside(source, files.config, Path(folder))
        yield folder


@contextmanager
def linked(model: str, entries: Iterable[Path], config: Config | None) -> Iterator[str]:
    """A temporary folder for a model, with links to files and folders, and a `config` of its own."""
    with folder_for(model) as folder:
        for entry in entries:
            link = Path(folder) / entry.name
            link.unlink(missing_ok=True)
            link.symlink_to(entry.resolve())
        if config is not None:
            _write(Path(folder) / "config.json", config)
        yield folder


def downloaded(model: str, revision: str | None) -> Path:
    """The folder of a checkpoint on this machine; one of the hub has no weights of other frameworks."""
    if Path(model).is_dir():
        return Path(model)
    others = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.gguf"]
    return Path(snapshot_download(model, revision=revision, ignore_patterns=others))


def _translation(config: Config, tensors: Collection[str] = ()) -> Callable[[Config], Config] | None:
    """The function that translates a config, if it must be. `tensors` are their names, where at hand."""
    kind, flash = config.get("model_type"), is_flash_xlm_roberta(config)
    positions = config.get("position_embedding_type")
    if positions == "rotary" and (flash or kind in ("xlm-roberta", "xlm_roberta")):
        return _rotary_xlm_roberta
    if flash:
        return flash_xlm_roberta
    if kind == "bert" and positions == "alibi":
        return partial(jina_bert, tensors=tensors)
    if kind == "nomic_bert" and "n_embd" in config:
        return nomic_bert
    if kind == "new" or (kind == "gte" and "rope_theta" in config):
        return gte
    return None


def _rotary_xlm_roberta(config: Config) -> Config:
    """jina-colbert-v2: XLM-RoBERTa with rotary positions, as transformers has it (jina-embeddings-v3)."""
    if config.get("lora_adaptations"):
        raise ModelLoadError(
            "this checkpoint has adapters woven into its weights; name its version for transformers, "
            "such as jinaai/jina-embeddings-v3-hf"
        )
    return config | {
        "model_type": "jina_embeddings_v3",
        "rope_parameters": _rope(config.get("rotary_emb_base", 10_000.0)),
        "tie_word_embeddings": False,
    }


def _rope(theta: float) -> Config:
    return {"rope_type": "default", "rope_theta": float(theta)}


def gte(config: Config) -> Config:
    """Alibaba's `NewModel` (gte-multilingual, gte-*-en-v1.5) and Snowflake's `GteModel`, as GTE.

    Source: the configuration and the modeling file of Alibaba-NLP/new-impl, whose defaults these are. It
    multiplies the base of the rotary frequencies by a factor f and divides them by f^(2/d) for heads of d
    dimensions (NTK scaling, https://kexue.fm/archives/9706), which transformers calls linear scaling of that
    larger base."""
    config = _NEW_DEFAULTS | _NEW_ONLY | config
    _require(config, _NEW_ONLY)
    if "NewForMaskedLM" in (config.get("architectures") or []):
        _require(config, {"hidden_act": "gelu"})  # of transformers' output layer, whatever the config says
    rope = _rope(config["rope_theta"])
    scaling = config.get("rope_scaling")
    if scaling is not None:
        if scaling.get("type") != "ntk" or scaling.get("mixed_b") is not None:
            raise ModelLoadError(
                f"this checkpoint scales rotary positions by {scaling}; of such models ntk is supported"
            )
        factor = float(scaling["factor"])
        dims = config["hidden_size"] // config["num_attention_heads"]
        rope = _rope(rope["rope_theta"] * factor) | {"rope_type": "linear", "factor": factor ** (2 / dims)}
    rest = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    return rest | {"model_type": "gte", "rope_parameters": rope}


_NEW_DEFAULTS: Config = {
    "tie_word_embeddings": True,
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-12,
    "pad_token_id": None,
    "rope_theta": 10000.0,
}
_NEW_ONLY: Config = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "logn_attention_scale": False,
}


def jina_bert(config: Config, tensors: Collection[str]) -> Config:
    """jina-embeddings-v2, jina-colbert-v1 and jina-reranker-v1: BERT with ALiBi, in one of two layouts that
    configs do not always tell apart. `tensors` are their names, if the files are safetensors."""
    config = {"feed_forward_type": "original", "is_decoder": False} | config
    if config["feed_forward_type"] not in ACTIVATIONS:
        _require(config, {"feed_forward_type": "geglu"})
    _require(config, {"is_decoder": False})
    said = f"{config.get('_name_or_path')} {config.get('auto_map')}"
    normed = any("layer_norm_q" in name for name in tensors) or (not tensors and "qk-post-norm" in said)
    # The attention of its code; transformers would take it for one of its own names.
    rest = {name: value for name, value in config.items() if name != "attn_implementation"}
    return rest | {"model_type": JinaBertConfig.model_type, "norms_queries_and_keys": normed}


def nomic_bert(config: Config) -> Config:
    """nomic-embed-text, whose configs have GPT-2's names: gated layers without biases, as in transformers,
    or plain ones with biases, some of them experts."""
    plain = config.get("activation_function") == "gelu"
    kind = _NOMIC_PLAIN if plain else _NOMIC_GATED
    _require(_NOMIC_DEFAULTS | config, _NOMIC_DEFAULTS | kind)
    return config | {
        "model_type": NomicMoeConfig.model_type if plain else "nomic_bert",
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "intermediate_size": config["n_inner"],
        "max_position_embeddings": config["n_positions"],
        "layer_norm_eps": config["layer_norm_epsilon"],
        "hidden_act": "gelu" if plain else "silu",
        "rope_parameters": _rope(config["rotary_emb_base"]),
        "moe_every_n_layers": config.get("moe_every_n_layers") or 0,
    }


# The settings of NomicBERT that are supported; a value that means nothing may be left out.
_NOMIC_DEFAULTS: Config = {
    "prenorm": False,
    "parallel_block": False,
    "causal": False,
    "use_rms_norm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "ffn_div": 1,
}
_NOMIC_GATED: Config = {
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "moe_every_n_layers": 0,
}
_NOMIC_PLAIN: Config = {
    "qkv_proj_bias": True,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "expert_choice_router": False,
}
_XLM_ROBERTA = (None, "xlm-roberta", "xlm_roberta")


def is_flash_xlm_roberta(config: Config) -> bool:
    """Whether a config is for jinaai/xlm-roberta-flash-implementation, whose configs may have no type."""
    code = str((config.get("auto_map") or {}).get("AutoConfig", ""))
    return code.endswith("XLMRobertaFlashConfig") and config.get("model_type") in _XLM_ROBERTA


def flash_xlm_roberta(config: Config) -> Config:
    """jina-reranker-v2: XLM-RoBERTa as it is, with its tensors under other names."""
    only = {"pad_vocab_size_multiple": 1, "position_embedding_type": "absolute", "hidden_act": "gelu"}
    config = only | config
    if config["hidden_act"] in ("gelu_new", "gelu_fast"):  # which that code computes alike
        config["hidden_act"] = "gelu_pytorch_tanh"
    if config["hidden_act"] == "gelu_pytorch_tanh":
        del only["hidden_act"]
    _require(config, only | {"lora_adaptations": None})
    return config | {"model_type": XLMRobertaFlashConfig.model_type}


def _require(config: Config, required: Mapping[str, Any]) -> None:
    """Raises ModelLoadError for a config that has other values."""
    for name, value in required.items():
        if (config.get(name) or None) != (value or None):  # what is off may be left out
            raise ModelLoadError(
                f"this checkpoint sets {name} to {config.get(name)!r}; such models are supported with "
                f"{value!r} alone"
            )


# Pooling methods: NVIDIA's names and those of sentence-transformers.
POOLING = {"avg": "mean", "cls": "cls", "last": "lasttoken"}
_BASE = "sentence_transformers.base.modules"


def language_model_translation(config: Mapping[str, Any]) -> Callable[[Config], Config] | None:
    """The translation of a retrained language model's config, or None for a model of another kind."""
    named = config.get("architectures")
    by_kind = {
        "llama_bidirec": _llama,
        MINICPM: _minicpm,
        COST_WISE: _cost_wise_gemma,
        JINA_V5: _jina_v5,
        "Lfm2BidirectionalModel": _lfm2,
        "lfm2_bidirectional": _lfm2,
    }
    architecture = named[0] if isinstance(named, list) and named else None
    found = by_kind.get(str(config.get("model_type"))) or by_kind.get(str(architecture))
    return found or (_qwen3 if has_projection(config) else None)


def has_projection(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of voyage-4-nano: a Qwen3 that reads in both directions, with a projection."""
    if config.get("model_type") != "qwen3" or config.get("use_bidirectional_attention") is not True:
        return False
    mapped = config.get("auto_map")
    return isinstance(mapped, dict) and "Qwen3BidirectionalModel" in str(mapped.get("AutoModel"))


def _llama(config: Config) -> Config:
    """NVIDIA's: a Llama that attends in both directions."""
    if config.get("pooling", "avg") not in POOLING:
        supported = ", ".join(POOLING)
        raise ModelLoadError(f"it pools by {config['pooling']}; of its kind {supported} are read")
    reranks = LLAMA_RERANKER in (config.get("architectures") or [])
    architecture = "LlamaForSequenceClassification" if reranks else "LlamaModel"
    return config | {"model_type": "llama", "architectures": [architecture], "is_causal": False}


def _qwen3(config: Config) -> Config:
    # The numbers of "labels" are the projection's columns.
    others = {name: each for name, each in config.items() if name not in ("id2label", "label2id")}
    return others | {"architectures": ["Qwen3Model"], "is_causal": False}


def _lfm2(config: Config) -> Config:
    return config | {"model_type": "lfm2", "architectures": ["Lfm2Model"], "is_causal": False}


def _jina_v5(config: Config) -> Config:
    """jina-embeddings-v5-text-small, a Qwen3, and -nano, a EuroBERT, under one name."""
    is_encoder = config.get("is_decoder") is False
    kind, architecture = ("eurobert", "EuroBertModel") if is_encoder else ("qwen3", "Qwen3Model")
    return config | {"model_type": kind, "architectures": [architecture]}


def _minicpm(config: Config) -> Config:
    """MiniCPM multiplies embeddings, and what each half of a layer adds, as Granite does."""
    if config.get("head_type", "simple") != "simple" or config.get("head_multi", True) is not True:
        raise ModelLoadError("of MiniCPM rerankers those with a simple head for each layer are read")
    if config.get("rope_scaling"):
        raise ModelLoadError("this MiniCPM scales its rotary positions, which is not carried out here")
    others = {name: each for name, each in config.items() if name not in ("rope_scaling", "rope_theta")}
    return others | {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": config.get("scale_emb", 1),
        "residual_multiplier": config.get("scale_depth", 1) / config["num_hidden_layers"] ** 0.5,
        "attention_multiplier": (config["hidden_size"] // config["num_attention_heads"]) ** -0.5,
        "logits_scaling": 1.0,
        "rope_parameters": _rope(config.get("rope_theta", 10_000.0)),
        "tie_word_embeddings": False,
    }


def _cost_wise_gemma(config: Config) -> Config:
    """A Gemma2, whose attention does not cap its logits: its own code is run by torch's attention, in which
    `attn_logit_softcapping` has no effect (transformers 4.46, for which it was written)."""
    if config.get("layer_wise") is not True:
        raise ModelLoadError("of such Gemma2 rerankers those with a head for each layer are read")
    return config | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": None,
        "tie_word_embeddings": False,
    }


def _write_modules_beside(source: Path, config: Config, folder: Path) -> None:
    """Writes the modules that an encoder's card describes, where the checkpoint `source` has none, and the
    projection into a folder."""
    has_modules = (source / "modules.json").is_file()
    named = config.get("architectures") or []
    if JINA_V5 in named:
        write_modules(folder, config["hidden_size"], "lasttoken")
        prompts = {"query": "Query: ", "document": "Document: "}
        settings: Config = {"prompts": prompts, "default_prompt_name": "document"}
        _write(folder / "config_sentence_transformers.json", settings)
        longest = {"max_seq_length": config["max_position_embeddings"], "do_lower_case": False}
        _write(folder / "sentence_bert_config.json", longest)
    elif config.get("model_type") == "llama_bidirec":
        if not has_modules and LLAMA_RERANKER not in named:
            write_modules(folder, config["hidden_size"], POOLING[config.get("pooling", "avg")])
            settings = {"prompts": {"query": "query: ", "document": "passage: "}}
            _write(folder / "config_sentence_transformers.json", settings)
    elif has_projection(config):
        if has_modules:
            _check_mean(source)
        write_modules(folder, config["hidden_size"], "mean", _projection(source, config))


def _check_mean(source: Path) -> None:
    """Raises ModelLoadError for modules other than a transformer, a mean and normalization."""
    modules = modules_in(source)
    kinds = [kind.rsplit(".", 1)[-1] for _, kind in modules]
    if kinds != ["Transformer", "Pooling", "Normalize"]:
        raise ModelLoadError(f"before and behind its projection it has other modules: {', '.join(kinds)}")
    pooling = json_of(source / modules[1][0] / "config.json") or {}
    earlier = {name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True}
    is_mean = pooling.get("pooling_mode") == "mean" or earlier == {"pooling_mode_mean_tokens"}
    if not is_mean or pooling.get("include_prompt") is False:
        raise ModelLoadError("it pools otherwise than by the mean of all tokens, prompts included")


def _projection(source: Path, config: Config) -> torch.Tensor:
    """The projection of voyage-4-nano [columns, hidden]."""
    tensors = read_tensors(str(source), None, "linear.")
    columns = config.get("num_labels") or len(config.get("id2label") or ()) or None
    weight = tensors.get("weight")
    if weight is None or len(tensors) > 1:
        found = ", ".join(f"linear.{name}" for name in sorted(tensors)) or "none"
        raise ModelLoadError(f"it must have the projection linear.weight alone, and has {found}")
    if weight.ndim != 2 or weight.shape != (columns or len(weight), config["hidden_size"]):
        raise ModelLoadError(f"its projection linear.weight is {list(weight.shape)}, which does not fit")
    return weight


def write_modules(folder: Path, hidden: int, pooling: str, projection: torch.Tensor | None = None) -> None:
    """Modules that pool, project (which is linear, so that it may come after the mean) and normalize."""
    pools = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
    kinds = {"": f"{_BASE}.transformer.Transformer", "read_Pooling": pools}
    _write(folder / "read_Pooling" / "config.json", {"embedding_dimension": hidden, "pooling_mode": pooling})
    if projection is not None:
        kinds["read_Dense"] = f"{_BASE}.dense.Dense"
        settings: Config = {"in_features": hidden, "out_features": len(projection), "bias": False}
        settings["activation_function"] = "torch.nn.modules.linear.Identity"
        _write(folder / "read_Dense" / "config.json", settings)
        save_file({"linear.weight": projection}, folder / "read_Dense" / "model.safetensors")
    kinds["read_Normalize"] = f"{_BASE}.normalize.Normalize"
    _write(folder / "read_Normalize" / "config.json", {})
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())
    ]
    _write(folder / "modules.json", modules)


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # a link to a file of the checkpoint
    path.write_text(json.dumps(content), encoding="utf-8")
