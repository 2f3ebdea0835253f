"""Alibaba's encoders with code of their own, tensor by tensor as they are published."""

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints.tokenizers import WORDS, wordpiece, xlm_roberta
from tests.checkpoints.weights import SIZES, RandomTensors, save, save_modules

_CODE = "Alibaba-NLP/new-impl--"
CONFIG: dict[str, Any] = SIZES | {
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": f"{_CODE}configuration.NewConfig",
        "AutoModel": f"{_CODE}modeling.NewModel",
        "AutoModelForSequenceClassification": f"{_CODE}modeling.NewForSequenceClassification",
        "AutoModelForTokenClassification": f"{_CODE}modeling.NewForTokenClassification",
    },
    "classifier_dropout": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02, "label2id": {"LABEL_0": 0}, "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm", "logn_attention_clip1": False, "logn_attention_scale": False,
    "max_position_embeddings": 512, "model_type": "new", "pack_qkv": True, "pad_token_id": 1,
    "position_embedding_type": "rope", "rope_scaling": {"factor": 8.0, "type": "ntk"}, "rope_theta": 20000,
    "type_vocab_size": 1, "unpad_inputs": False, "use_memory_efficient_attention": False,
}  # fmt: skip


def multilingual(folder: Path) -> str:
    """Alibaba-NLP/gte-multilingual-base: NTK scaling, and a layer that weighs tokens for sparse vectors."""
    config = _sentencepiece(folder) | {"architectures": ["NewForTokenClassification"]}
    save(folder, config, _backbone(config, "new.") | RandomTensors(5).linear("classifier", 1, 128))
    return save_modules(folder, "cls", normalize=True)


def multilingual_reranker(folder: Path) -> str:
    """Alibaba-NLP/gte-multilingual-reranker-base: a pooler and one label."""
    config = _sentencepiece(folder) | {"architectures": ["NewForSequenceClassification"]}
    random = RandomTensors(6)
    head = random.linear("new.pooler.dense", 128, 128) | random.linear("classifier", 1, 128)
    return save(folder, config, _backbone(config, "new.") | head)


def snowflake(folder: Path) -> str:
    """Snowflake/snowflake-arctic-embed-m-v2.0: a larger base for the scaling, no prefix, and a prompt."""
    code = "configuration_hf_alibaba_nlp_gte.GteConfig", "modeling_hf_alibaba_nlp_gte.GteModel"
    config = _sentencepiece(folder) | {
        "architectures": ["GteModel"], "auto_map": dict(zip(("AutoConfig", "AutoModel"), code, strict=True)),
        "model_type": "gte", "rope_scaling": None, "rope_theta": 160000, "unpad_inputs": "true",
        "use_memory_efficient_attention": "true",
    }  # fmt: skip
    save(folder, config, _backbone(config, ""))
    return save_modules(folder, "cls", normalize=True, prompts={"query": "query: "})


def english(folder: Path, types: int = 2) -> str:
    """Alibaba-NLP/gte-large-en-v1.5: BERT's tokenizer, and learned types of tokens, or none as the base."""
    wordpiece().save_pretrained(folder)
    config = CONFIG | {
        "architectures": ["NewModel"], "pad_token_id": 0, "rope_scaling": {"factor": 2.0, "type": "ntk"},
        "rope_theta": 500000, "type_vocab_size": types, "vocab_size": WORDS + 8,
    }  # fmt: skip
    save(folder, config, _backbone(config, "new."))
    return save_modules(folder, "cls", normalize=False)


def _sentencepiece(folder: Path) -> dict[str, Any]:
    return CONFIG | {"vocab_size": xlm_roberta(folder)}


def _backbone(config: dict[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    random, hidden, inner = RandomTensors(4), config["hidden_size"], config["intermediate_size"]
    named = {"embeddings.word_embeddings.weight": random.embedding(config["vocab_size"], hidden)}
    if config["type_vocab_size"]:
        named["embeddings.token_type_embeddings.weight"] = random.embedding(config["type_vocab_size"], hidden)
    named |= random.norm("embeddings.LayerNorm", hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        named |= {
            **random.linear(f"{layer}attention.qkv_proj", 3 * hidden, hidden),
            **random.linear(f"{layer}attention.o_proj", hidden, hidden),
            **random.linear(f"{layer}mlp.up_gate_proj", 2 * inner, hidden, bias=False),
            **random.linear(f"{layer}mlp.down_proj", hidden, inner),
            **random.norm(f"{layer}attn_ln", hidden),
            **random.norm(f"{layer}mlp_ln", hidden),
        }
    return {f"{prefix}{name}": tensor for name, tensor in named.items()}
