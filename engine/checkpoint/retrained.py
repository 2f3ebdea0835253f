"""Language models that were made into encoders and rerankers with code of their own: how transformers'
classes read them, and what must be beside them for sentence-transformers to do so.

Sources: the model cards, and the code that the checkpoints come with, none of which is run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from maxsimd.engine.checkpoint.fit import refuse_not_finite
from maxsimd.engine.checkpoint.weights import read_tensors
from maxsimd.engine.errors import ModelLoadError

Config = dict[str, Any]

LLAMA_RERANKER = "LlamaBidirectionalForSequenceClassification"
MINICPM, COST_WISE = "LayerWiseMiniCPMForCausalLM", "CostWiseGemmaForCausalLM"
LAYERWISE = (MINICPM, COST_WISE)
JINA_V5 = "JinaEmbeddingsV5Model"
_LFM2 = "lfm2_bidirectional"
# How NVIDIA names pooling, and sentence-transformers.
POOLING = {"avg": "mean", "cls": "cls", "last": "lasttoken"}
_BASE, _OF_EMBEDDINGS = (
    "sentence_transformers.base.modules",
    "sentence_transformers.sentence_transformer.modules",
)


def retrained(config: Mapping[str, Any]) -> Callable[[Config], Config] | None:
    """How the config of such a model is translated, or None for a model of another kind."""
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if config.get("model_type") == "llama_bidirec":
        return _llama
    if architecture == MINICPM:
        return _minicpm
    if architecture == COST_WISE:
        return _cost_wise_gemma
    if architecture == JINA_V5:
        return _jina_v5
    if architecture == "Lfm2BidirectionalModel" or config.get("model_type") == _LFM2:
        return _lfm2
    return _qwen3 if has_projection(config) else None


def has_projection(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of voyage-4-nano: a Qwen3 that reads in both directions, and a projection of
    each token's state."""
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
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads = config["num_attention_heads"]
    others = {name: each for name, each in config.items() if name not in ("rope_scaling", "rope_theta")}
    return others | {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": config.get("scale_emb", 1),
        "residual_multiplier": config.get("scale_depth", 1) / layers**0.5,
        "attention_multiplier": (hidden // heads) ** -0.5,
        "logits_scaling": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.get("rope_theta", 10_000.0)},
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


def files_beside(source: Path, config: Config, folder: Path) -> None:
    """Writes into a folder what sentence-transformers must find beside the config of an encoder: the modules
    that its card describes, where the checkpoint `source` has none, and the projection."""
    has_modules = (source / "modules.json").is_file()
    if JINA_V5 in (config.get("architectures") or []):
        _write_modules(folder, config["hidden_size"], "lasttoken")
        prompts = {"query": "Query: ", "document": "Document: "}
        settings: Config = {"prompts": prompts, "default_prompt_name": "document"}
        _write(folder / "config_sentence_transformers.json", settings)
        longest = {"max_seq_length": config["max_position_embeddings"], "do_lower_case": False}
        _write(folder / "sentence_bert_config.json", longest)
    elif config.get("model_type") == "llama_bidirec":
        if not has_modules and LLAMA_RERANKER not in (config.get("architectures") or []):
            pooling = POOLING[config.get("pooling", "avg")]
            _write_modules(folder, config["hidden_size"], pooling)
            settings = {"prompts": {"query": "query: ", "document": "passage: "}}
            _write(folder / "config_sentence_transformers.json", settings)
    elif has_projection(config):
        if has_modules:
            _check_mean(source)
        _write_modules(folder, config["hidden_size"], "mean", _projection(source, config))


def _check_mean(source: Path) -> None:
    """Raises ModelLoadError for modules other than a transformer, a mean and normalisation."""
    modules = json.loads((source / "modules.json").read_text(encoding="utf-8"))
    kinds = [str(module.get("type")).rsplit(".", 1)[-1] for module in modules]
    if kinds != ["Transformer", "Pooling", "Normalize"]:
        raise ModelLoadError(f"before and behind its projection it has other modules: {', '.join(kinds)}")
    path = source / str(modules[1].get("path")) / "config.json"
    pooling = json.loads(path.read_text(encoding="utf-8"))
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
    refuse_not_finite(str(source), [("linear.weight", weight)])
    return weight


def _write_modules(folder: Path, hidden: int, pooling: str, projection: torch.Tensor | None = None) -> None:
    """Modules that pool, project (which is linear, so that it may come after the mean) and normalise."""
    kinds = {"": f"{_BASE}.transformer.Transformer", "read_Pooling": f"{_OF_EMBEDDINGS}.pooling.Pooling"}
    _write(folder / "read_Pooling" / "config.json", {"embedding_dimension": hidden, "pooling_mode": pooling})
    if projection is not None:
        kinds["read_Dense"] = f"{_BASE}.dense.Dense"
        settings = {
            "in_features": hidden,
            "out_features": len(projection),
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
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
