"""Small configurations for every architecture that transformers has: settings by their names, which most
configurations share, and what single architectures need beside them."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

# The special tokens of the tokeniser that all of them share (`architectures.save_tokenizer`).
BOS, PAD, EOS, UNK, MASK = range(5)

# Values, and the settings that have each of them, by the names that architectures give them.
_BY_VALUE = [
    # Widths.
    (64, "hidden_size d_model n_embd dim emb_dim embedding_size pooler_hidden_size "
          "word_embed_proj_dim"),
    (128, "intermediate_size hidden_dim ffn_dim d_ff d_inner n_inner encoder_ffn_dim "
          "decoder_ffn_dim ffn_hidden_size"),
    # Depths.
    (2, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers "
          "num_encoder_layers num_decoder_layers"),
    # Heads.
    (4, "num_attention_heads num_heads n_head n_heads encoder_attention_heads "
          "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads"),
    (16, "head_dim d_kv d_head kv_lora_rank qk_head_dim v_head_dim"),
    (8, "rotary_dim qk_rope_head_dim qk_nope_head_dim"),
    (24, "q_lora_rank"),
    # Attention to a part: so small that the texts of the tests are longer. Not BigBird's blocks: it turns
    # from sparse to full attention at its first short text (of up to 704 tokens) and never back, so that even
    # the reference would depend on what it scored before. With few heads of an index, keys tie at a score of
    # 0, and which are kept is a matter of chance.
    (16, "sliding_window attention_chunk_size attention_window_size sliding_window_size "
          "local_attention local_attention_window_len local_transformer_stride keep_window_size "
          "index_head_dim index_n_heads"),
    (8, "attention_window index_topk"),
    (4, "index_block_size"),
    (2, "index_topk_blocks"),
    # Recurrences.
    (4, "linear_num_heads linear_num_value_heads"),
    (16, "linear_head_dim linear_key_head_dim linear_value_head_dim mamba_chunk_size chunk_size"),
    (2, "linear_num_key_heads"),
    # Experts.
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts "
          "first_k_dense_replace"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    # Positions.
    (256, "max_position_embeddings n_positions max_seq_len"),
    # Special tokens.
    (PAD, "pad_token_id pad_index"),
    (BOS, "bos_token_id cls_token_id bos_index"),
    (EOS, "eos_token_id sep_token_id decoder_start_token_id eos_index"),
    (UNK, "unk_index"),
    (MASK, "mask_token_id mask_index"),
]  # fmt: skip
_SHARED: dict[str, Any] = {name: value for value, names in _BY_VALUE for name in names.split()}
# How architectures call the number of layers.
_DEPTHS = [name for name, value in _SHARED.items() if "layers" in name or name == "n_layer"]
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
