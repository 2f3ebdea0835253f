"""Configs of architectures that their authors published with code of their own, in the terms of the classes
that run them here. What such a config asks for and those classes do not do is refused.
"""

from collections.abc import Collection, Mapping
from typing import Any

from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.models.jina_bert import ACTIVATIONS, JinaBertConfig
from maxsimd.engine.models.nomic_moe import NomicMoeConfig
from maxsimd.engine.models.xlm_roberta_flash import XLMRobertaFlashConfig

Config = dict[str, Any]


def gte(config: Config) -> Config:
    """Alibaba's `NewModel` (gte-multilingual, gte-*-en-v1.5) and Snowflake's `GteModel`, as transformers'
    GTE.

    Source: the configuration and the modeling file of Alibaba-NLP/new-impl, whose defaults these are. It
    multiplies the base of the rotary frequencies by a factor f and divides them by f^(2/d) for heads of d
    dimensions (NTK scaling, https://kexue.fm/archives/9706), which transformers calls linear scaling of that
    larger base."""
    config = _NEW_DEFAULTS | config
    _require(
        config,
        {
            "position_embedding_type": "rope",
            "layer_norm_type": "layer_norm",
            "pack_qkv": True,
            "logn_attention_scale": False,
        },
    )
    theta = float(config["rope_theta"])
    rope: Config = {"rope_type": "default", "rope_theta": theta}
    scaling = config.get("rope_scaling")
    if scaling is not None:
        if scaling.get("type") != "ntk" or scaling.get("mixed_b") is not None:
            raise ModelLoadError(
                f"this checkpoint scales rotary positions by {scaling}; of such models ntk is supported"
            )
        factor = float(scaling["factor"])
        dims = config["hidden_size"] // config["num_attention_heads"]
        rope = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / dims)}
    rest = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    return rest | {"model_type": "gte", "rope_parameters": rope, "tie_word_embeddings": False}


_NEW_DEFAULTS: Config = {
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "type_vocab_size": 1,
    "layer_norm_type": "layer_norm",
    "layer_norm_eps": 1e-12,
    "pad_token_id": None,
    "position_embedding_type": "rope",
    "rope_theta": 10000.0,
    "pack_qkv": True,
    "logn_attention_scale": False,
}


def jina_bert(config: Config, tensors: Collection[str]) -> Config:
    """jina-embeddings-v2, jina-colbert-v1 and jina-reranker-v1: BERT with ALiBi, in one of two layouts that
    configs do not always tell apart. `tensors` are the names in the checkpoint's files, if these are
    safetensors."""
    config = {"feed_forward_type": "original", "is_decoder": False} | config
    if config["feed_forward_type"] not in ACTIVATIONS:
        _require(config, {"feed_forward_type": "geglu"})
    _require(config, {"is_decoder": False})
    said = f"{config.get('_name_or_path')} {config.get('auto_map')}"
    normed = any("layer_norm_q" in name for name in tensors) or (not tensors and "qk-post-norm" in said)
    # How its code attends, which transformers would take for a name of its own.
    rest = {name: value for name, value in config.items() if name != "attn_implementation"}
    return rest | {"model_type": JinaBertConfig.model_type, "norms_queries_and_keys": normed}


def nomic_bert(config: Config) -> Config:
    """nomic-embed-text, whose configs have GPT-2's names: gated layers without biases, as transformers has
    them, or plain ones with biases, some of them experts."""
    plain = config.get("activation_function") == "gelu"
    kind = _NOMIC_PLAIN if plain else _NOMIC_GATED
    _require(_NOMIC_DEFAULTS | config, _NOMIC_DEFAULTS | kind)
    translated = config | {
        "model_type": NomicMoeConfig.model_type if plain else "nomic_bert",
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "intermediate_size": config["n_inner"],
        "max_position_embeddings": config["n_positions"],
        "layer_norm_eps": config["layer_norm_epsilon"],
        "hidden_act": "gelu" if plain else "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config["rotary_emb_base"])},
    }
    if plain:
        translated |= {"moe_every_n_layers": config.get("moe_every_n_layers") or 0}
    return translated


# What of NomicBERT's settings is carried out; a value that means nothing may be left out.
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


def is_flash_xlm_roberta(config: Config) -> bool:
    """Whether a config is for jinaai/xlm-roberta-flash-implementation, whose configs may have no type."""
    code = str((config.get("auto_map") or {}).get("AutoConfig", ""))
    return code.endswith("XLMRobertaFlashConfig") and config.get("model_type") in _XLM_ROBERTA


_XLM_ROBERTA = (None, "xlm-roberta", "xlm_roberta")


def flash_xlm_roberta(config: Config) -> Config:
    """jina-reranker-v2: XLM-RoBERTa as it is, with its tensors under other names."""
    config = {
        "pad_vocab_size_multiple": 1,
        "position_embedding_type": "absolute",
        "hidden_act": "gelu",
    } | config
    if config["hidden_act"] in ("gelu_new", "gelu_fast"):  # which that code computes alike
        config["hidden_act"] = "gelu_pytorch_tanh"
    _require(config, {"pad_vocab_size_multiple": 1, "position_embedding_type": "absolute"})
    if config["hidden_act"] != "gelu_pytorch_tanh":
        _require(config, {"hidden_act": "gelu"})
    return config | {"model_type": XLMRobertaFlashConfig.model_type}


def _require(config: Config, required: Mapping[str, Any]) -> None:
    """Raises ModelLoadError for a config that has other values."""
    for name, value in required.items():
        if (config.get(name) or None) != (value or None):  # what is off may be left out
            raise ModelLoadError(
                f"this checkpoint sets {name} to {config.get(name)!r}; such models are supported with "
                f"{value!r} alone"
            )
