"""Every architecture of transformers, small and random, and what sentence-transformers makes of it."""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from maxsimd.bench.datasets import Pair, docstring_pairs
from tests.checkpoints.tokenizers import XLM_R, byte_level_bpe

Outputs = NDArray[np.float32]


@dataclass(frozen=True)
class Architecture:
    """A classifier (cross-encoder) or a plain model (bi-encoder), by what its config.json calls its type."""

    kind: Literal["cross-encoder", "bi-encoder"]
    model_type: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.model_type}"


def all_architectures() -> list[Architecture]:
    """All that transformers knows, those that are left out included."""
    classifiers, models = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, MODEL_MAPPING_NAMES
    return [Architecture("cross-encoder", name) for name in classifiers] + [
        Architecture("bi-encoder", name) for name in models
    ]


# Parts of a configuration, and words in the names of models, for more than text.
_OTHER_PARTS = re.compile(
    "vision|image|video|audio|acoustic|speech|codec|vocoder|vq_|flow_head|protein|backbone"
)
_OTHER_MODELS = re.compile("Vision|Video|Audio|Speech|VQ")
_LEFT_OUT = {
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), "it hears and speaks: text is one of its four ends"),
    "fuyu": "it sees: pieces of images take part in its texts, so it is not built from text alone",
    "layoutlmv2": "it needs the package detectron2, which is no dependency of ours",
    "mra": "its attention is a CUDA kernel; without one transformers takes zeros in its place",
}


def left_out(architecture: Architecture) -> str | None:
    """Why an architecture is not built, or None if it is. What is not known here is built."""
    name = architecture.model_type
    if name in _LEFT_OUT:
        return _LEFT_OUT[name]
    config_class: Any = transformers.CONFIG_MAPPING[name]
    if config_class.model_type != name:
        return f"it is {config_class.model_type} by another name, and its config.json says that one"
    parts = sorted({part for part in _names_of_parts(config_class) if _OTHER_PARTS.search(part)})
    if parts:
        return f"it is not of text alone: its configuration has {parts[0]}"
    mapping: Any = transformers.MODEL_MAPPING
    if architecture.kind == "cross-encoder":
        mapping = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    try:
        found = mapping[config_class]
    except ValueError:
        return "transformers lists it, and has no class of that name"
    model_class = found[0] if isinstance(found, tuple) else found
    if _OTHER_MODELS.search(model_class.__name__):
        return f"it is not of text, as its name {model_class.__name__} says"
    takes = "input_ids" if architecture.kind == "cross-encoder" else model_class.main_input_name
    return None if takes == "input_ids" else f"it is not of text: it takes {takes}"


def _names_of_parts(config_class: Any) -> Iterator[str]:
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        yield name
        yield from _names_of_parts(part)


# Architectures that can be built, and that sentence-transformers does not score.
UNSCORED = {
    # It finds none of their encoder's tensors, and leaves them random.
    *("blenderbot", "blenderbot-small", "m2m_100", "marian", "pegasus", "pegasus_x", "prophetnet"),
    # It reads their files with a processor of images, of sounds (dia) or of HTML (markuplm).
    *("layoutlmv3", "neomme", "udop", "vilt", "dia", "markuplm"),
    # They ask for the states of an image, for the boxes in which words stand, or for an image.
    *("blip_2_qformer", "bros", "lxmert"),
    "dpr",  # it has no hidden states, only their pooled one
    "nllb-moe",  # it needs something for its decoder, which is given nothing
    "vits",  # it makes sounds; its hidden states are not what its forward returns
}


def build(architecture: Architecture, folder: Path) -> str:
    """Saves it with its tokenizer, as transformers does."""
    config = small_config(architecture.model_type, save_tokenizer(architecture.model_type, folder))
    auto: Any = transformers.AutoModel
    if architecture.kind == "cross-encoder":
        config.num_labels = 1
        auto = transformers.AutoModelForSequenceClassification
    config.architectures = []
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    assert size < 20e6, f"{architecture} has {size:,} parameters; add settings that make it small"
    torch.manual_seed(0)
    randomise(auto.from_config(config)).save_pretrained(folder)
    return str(folder)


def classifier(folder: Path, model_type: str) -> str:
    return build(Architecture("cross-encoder", model_type), folder)


def save_tokenizer(model_type: str, folder: Path) -> int:
    """One tokenizer for all; returns its size. It tells the first text from the second where models do."""
    default: Any = transformers.CONFIG_MAPPING[model_type]()
    names = ["input_ids", "attention_mask"]
    if getattr(default, "type_vocab_size", 0) > 1 or model_type == "xlnet":
        names.insert(1, "token_type_ids")
    pair = "<s> $A </s> $B:1 </s>:1"
    return byte_level_bpe(folder, XLM_R, "<s> $A </s>", pair, model_input_names=names)


# Parameters that decay, mix or measure time, and are stable about where they start.
_KEPT_NEAR = re.compile(r"A_log|dt_bias|\.D$|time_decay|time_first|time_mix|recurrent_param")


@torch.no_grad()
def randomise(model: Any) -> Any:
    """Gives every parameter another value than a fresh model has, of about the same size."""
    torch.manual_seed(1)
    owners = {id(weight): part for part in model.modules() for weight in part.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if _KEPT_NEAR.search(name):
            parameter.mul_(1 + 0.1 * noise)
        elif parameter.dim() < 2:
            parameter.add_(noise * (0.2 if name.endswith("weight") else 0.3))
        elif isinstance(owners[id(parameter)], nn.Embedding):
            parameter.copy_(0.3 * noise)
        else:
            gain = 3.0 if len(parameter) == 1 else 1.2  # one output is a logit
            parameter.copy_(gain / math.sqrt(_inputs(owners[id(parameter)], parameter)) * noise)
        assert parameter.isfinite().all(), f"{name} is not finite"
    return model.eval()


def _inputs(owner: nn.Module, weight: torch.Tensor) -> int:
    if isinstance(owner, nn.Linear | nn.Conv1d | nn.Conv2d):
        return weight[0].numel()
    return max(weight.shape[-2:])  # experts, and layers of transformers' own, either way round


@functools.cache
def sample_pairs(count: int = 8) -> list[Pair]:
    """From a few tokens to about 100, longer than any window of the small models."""
    pairs = docstring_pairs()[:count]
    return [Pair(pair.query, pair.document[: 10 + 40 * i]) for i, pair in enumerate(pairs)]


def reference(architecture: Architecture, path: str, pairs: Sequence[Pair]) -> Outputs:
    """sentence-transformers' logits of pairs, or its embeddings of their documents, one by one."""
    if architecture.kind == "cross-encoder":
        texts = [(pair.query, pair.document) for pair in pairs]
        model = CrossEncoder(path, device="cpu")
        logits = model.predict(texts, batch_size=1, activation_fn=nn.Identity(), show_progress_bar=False)
        return np.asarray(logits)
    documents = [pair.document for pair in pairs]
    encoder = SentenceTransformer(path, device="cpu")
    return np.asarray(encoder.encode(documents, batch_size=1, show_progress_bar=False))


def difference_of_inputs(outputs: Outputs) -> float:
    """By how much the logits differ, or the embeddings in their most different column."""
    return float(np.ptp(outputs, axis=0).max())


# The special tokens of the tokenizer that all of them share (`architectures.save_tokenizer`).
BOS, PAD, EOS, UNK, MASK = range(5)

# Values, and the settings that have each of them, by the names that architectures give them.
_BY_VALUE = [
    (64, "hidden_size d_model n_embd dim emb_dim embedding_size pooler_hidden_size "
          "word_embed_proj_dim"),
    (128, "intermediate_size hidden_dim ffn_dim d_ff d_inner n_inner encoder_ffn_dim "
          "decoder_ffn_dim ffn_hidden_size"),
    (2, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers "
          "num_encoder_layers num_decoder_layers"),
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
    (4, "linear_num_heads linear_num_value_heads"),
    (16, "linear_head_dim linear_key_head_dim linear_value_head_dim mamba_chunk_size chunk_size"),
    (2, "linear_num_key_heads"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts "
          "first_k_dense_replace"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    (256, "max_position_embeddings n_positions max_seq_len"),
    (PAD, "pad_token_id pad_index"),
    (BOS, "bos_token_id cls_token_id bos_index"),
    (EOS, "eos_token_id sep_token_id decoder_start_token_id eos_index"),
    (UNK, "unk_index"),
    (MASK, "mask_token_id mask_index"),
]  # fmt: skip
_SHARED: dict[str, Any] = {name: value for value, names in _BY_VALUE for name in names.split()}
_DEPTHS = [name for name, value in _SHARED.items() if "layers" in name or name == "n_layer"]
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "src_vocab_size", "tgt_vocab_size")
# Every configuration takes these, also where its own defaults leave them out.
_ALWAYS = {"pad_token_id", "bos_token_id", "eos_token_id"}
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types")

_EQUAL_HEADS = {"num_key_value_heads": 4}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_THREE_AXES = {"rope_parameters": {**_ROTARY, "mrope_section": [2, 3, 3]}}
_HALF_AXES = {"rope_parameters": {**_ROTARY, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("cosmos3_edge_text", "hunyuan_vl_text"), _THREE_AXES),
    **dict.fromkeys(("qwen2_5_vl_text", "qwen2_vl_text"), _THREE_AXES),
    **dict.fromkeys(("glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text"), _HALF_AXES),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32"), _LATENT),
    **dict.fromkeys(("glm_moe_dsa", "mistral_large4_text", "youtu"), _LATENT),
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_top_k": 2},
    },
    "dots3_note_text": {
        **_EQUAL_HEADS,
        "shared_experts_intermediate_size": 32, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24, "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "esmc": _EQUAL_HEADS,
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "altup_num_inputs": 2,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8},
    "glm5_next_text": {**_EQUAL_HEADS, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "index_kpool": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 96, "intermediate_size": 192},
    "longcat_flash": {**_LATENT, "expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "longt5": {"local_radius": 7},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8},
    "minimax": {"block_size": 16},
    "perceiver": {"num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "hc_lowrank": 16,
    },
    "reformer": {
        "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 48], "attn_layers": ["local", "lsh"],
        "attention_head_size": 16, "feed_forward_size": 128, "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 8,  # without it the first text's length decides, for all that come later
        "hash_seed": 1,  # without one each forward hashes differently
    },
    "t5": {"decoder_start_token_id": PAD},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4, "head_dim": 32, "attention_hidden_size": 128,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def small_config(model_type: str, vocabulary: int) -> Any:
    """A configuration of the smallest model that still has every kind of layer of its architecture."""
    config_class: Any = transformers.CONFIG_MAPPING[model_type]
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
    """The number of layers: one for each kind of them, two at least."""
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
