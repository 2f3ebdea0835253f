"""Small configurations for every architecture that transformers has: settings by their names, which most
configurations share, and what single architectures need beside them."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

# The special tokens of the tokeniser that all of them share (`architectures.save_tokenizer`).
BOS, PAD, EOS, UNK, MASK = range(5)

_WIDTHS = {
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "emb_dim": 64,
    "embedding_size": 64,
    "pooler_hidden_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 128,
    "hidden_dim": 128,
    "ffn_dim": 128,
    "d_ff": 128,
    "d_inner": 128,
    "n_inner": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "ffn_hidden_size": 128,
}
_DEPTHS = {
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}
_ATTENTION = {
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "d_head": 16,
    "rotary_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
}
# So small that the texts of the tests are longer. Not BigBird's blocks: it turns from sparse to full
# attention at its first short text (of up to 704 tokens) and never back, so that even the reference would
# depend on what it scored before.
_ATTENTION_TO_A_PART = {
    "sliding_window": 16,
    "attention_window": 8,
    "attention_chunk_size": 16,
    "attention_window_size": 16,
    "sliding_window_size": 16,
    "local_attention": 16,
    "local_attention_window_len": 16,
    "local_transformer_stride": 16,
    "keep_window_size": 16,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few, keys tie at a score of 0, and which are kept is a matter of chance
    "index_block_size": 4,
    "index_topk_blocks": 2,
}
_RECURRENCES = {
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
}
_POSITIONS = {"max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256}
_SPECIAL_TOKENS = {
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "cls_token_id": BOS,
    "sep_token_id": EOS,
    "mask_token_id": MASK,
    "decoder_start_token_id": EOS,
    "pad_index": PAD,
    "bos_index": BOS,
    "eos_index": EOS,
    "unk_index": UNK,
    "mask_index": MASK,
}
_SHARED: dict[str, Any] = {
    **_WIDTHS,
    **_DEPTHS,
    **_ATTENTION,
    **_ATTENTION_TO_A_PART,
    **_RECURRENCES,
    **_EXPERTS,
    **_POSITIONS,
    **_SPECIAL_TOKENS,
}
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "src_vocab_size", "tgt_vocab_size")
# Every configuration takes these, also where its own defaults leave them out.
_ALWAYS = {"pad_token_id", "bos_token_id", "eos_token_id"}
# One kind of layer for each layer.
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types")

_EQUAL_HEADS = {"num_key_value_heads": 4}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_THREE_AXES = {"rope_parameters": {**_ROTARY, "mrope_section": [2, 3, 3]}}
_THREE_AXES_OF_HALF = {
    "rope_parameters": {**_ROTARY, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
}
_OWN: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY}},
    "cosmos3_edge_text": _THREE_AXES,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_top_k": 2},
    },
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dots3_note_text": {
        **_EQUAL_HEADS,
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "esmc": _EQUAL_HEADS,
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8},
    "glm4v_moe_text": _THREE_AXES_OF_HALF,
    "glm4v_text": _THREE_AXES_OF_HALF,
    "glm5_next_text": {**_EQUAL_HEADS, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "index_kpool": 4},
    "glm_image_text": _THREE_AXES_OF_HALF,
    "glm_moe_dsa": _LATENT,
    "glm_ocr_text": _THREE_AXES_OF_HALF,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "hunyuan_vl_text": _THREE_AXES,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 96, "intermediate_size": 192},
    "longcat_flash": {**_LATENT, "expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "longt5": {"local_radius": 7},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8},
    "minimax": {"block_size": 16},
    "mistral_large4_text": _LATENT,
    "perceiver": {"num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2},
    "qwen2_5_vl_text": _THREE_AXES,
    "qwen2_vl_text": _THREE_AXES,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
    },
    "reformer": {
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 48],
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 16,
        "feed_forward_size": 128,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 8,  # without it the first text's length decides, for all that come later
        "hash_seed": 1,  # without one each forward hashes differently
    },
    "t5": {"decoder_start_token_id": PAD},
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT,
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
        "head_dim": 32,
        "attention_hidden_size": 128,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(model_type: str, vocabulary: int) -> Any:
    """A configuration of the smallest model that still has every kind of layer of its architecture."""
    config_class: Any = CONFIG_MAPPING[model_type]
    settings = _nested(_settings(config_class, vocabulary), _OWN.get(model_type, {}))
    return config_class(**settings)


def _settings(config_class: Any, vocabulary: int) -> dict[str, Any]:
    default = config_class()
    known = set(vars(default)) | _ALWAYS
    wanted = _SHARED | dict.fromkeys(_VOCABULARIES, vocabulary)
    settings = {name: value for name, value in wanted.items() if name in known} | _one_of_each_layer(default)
    for name in getattr(config_class, "sub_configs", None) or {}:
        part = getattr(default, name, None)
        if part is not None:
            settings[name] = _settings(type(part), vocabulary) | {"model_type": part.model_type}
    return settings


def _one_of_each_layer(default: Any) -> dict[str, Any]:
    """As many layers as there are kinds of them, two at least."""
    kinds = {name: list(dict.fromkeys(getattr(default, name, None) or [])) for name in _KINDS_OF_LAYERS}
    kinds = {name: found for name, found in kinds.items() if found and name in vars(default)}
    if not kinds:
        return {}
    depth = max(2, *map(len, kinds.values()))
    layers = {name: (found + found[-1:] * depth)[:depth] for name, found in kinds.items()}
    return layers | {name: depth for name in _DEPTHS if name in vars(default)}


def _nested(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `settings`, in the configurations of parts as well."""
    merged = dict(settings)
    for name, value in own.items():
        part = merged.get(name)
        merged[name] = _nested(part, value) if isinstance(part, dict) else value
    return merged
