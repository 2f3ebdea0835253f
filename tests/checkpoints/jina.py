"""Jina's encoders with code of their own, tensor by tensor as they are published."""

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints.late_interaction import write_artifact
from tests.checkpoints.tokenizers import ENDS, WORDS, XLM_R, byte_level_bpe, wordpiece, xlm_roberta
from tests.checkpoints.weights import SIZES, RandomTensors, save, save_modules


def reranker_v2(folder: Path) -> str:
    """jinaai/jina-reranker-v2-base-multilingual: XLM-RoBERTa in its authors' layout, of no model type."""
    config: dict[str, Any] = SIZES | {
        "architectures": ["XLMRobertaForSequenceClassification"], "attention_probs_dropout_prob": 0.1,
        "auto_map": {
            "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
            "AutoModelForSequenceClassification": "modeling_xlm_roberta.XLMRobertaForSequenceClassification",
        },
        "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu", "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0}, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
        "output_past": True, "pad_token_id": 1, "position_embedding_type": "absolute", "type_vocab_size": 1,
        "use_cache": False, "use_flash_attn": True, "vocab_size": xlm_roberta(folder),
        "lora_adaptations": None, "lora_alpha": 1, "lora_rank": 4, "load_trained_adapters": False,
    }  # fmt: skip
    random, hidden, inner = RandomTensors(7), config["hidden_size"], config["intermediate_size"]
    named = {
        "embeddings.word_embeddings.weight": random.embedding(config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": random.embedding(514, hidden),
        "embeddings.token_type_embeddings.weight": random.embedding(1, hidden),
        **random.norm("emb_ln", hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layers.{i}."
        named |= {
            **random.linear(f"{layer}mixer.Wqkv", 3 * hidden, hidden),
            **random.linear(f"{layer}mixer.out_proj", hidden, hidden),
            **random.norm(f"{layer}norm1", hidden),
            **random.linear(f"{layer}mlp.fc1", inner, hidden),
            **random.linear(f"{layer}mlp.fc2", hidden, inner),
            **random.norm(f"{layer}norm2", hidden),
        }
    head = random.linear("classifier.dense", hidden, hidden) | random.linear("classifier.out_proj", 1, hidden)
    return save(folder, config, {f"roberta.{name}": tensor for name, tensor in named.items()} | head)


_CODE = "jinaai/jina-bert-implementation--"
_JINA_BERT: dict[str, Any] = SIZES | {
    "_name_or_path": "jinaai/jina-bert-implementation", "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": f"{_CODE}configuration_bert.JinaBertConfig",
        "AutoModelForMaskedLM": f"{_CODE}modeling_bert.JinaBertForMaskedLM",
        "AutoModel": f"{_CODE}modeling_bert.JinaBertModel",
        "AutoModelForSequenceClassification": f"{_CODE}modeling_bert.JinaBertForSequenceClassification",
    },
    "classifier_dropout": None, "emb_pooler": "mean", "feed_forward_type": "geglu",
    "gradient_checkpointing": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02, "layer_norm_eps": 1e-12, "max_position_embeddings": 8192,
    "model_max_length": 8192, "model_type": "bert", "pad_token_id": 0, "position_embedding_type": "alibi",
    "type_vocab_size": 2, "use_cache": True, "vocab_size": WORDS + 8,
}  # fmt: skip


def embeddings_v2(folder: Path, feed_forward: str = "geglu") -> str:
    """jinaai/jina-embeddings-v2-base-en: the mean, not normalized, or ReLU in its gates by `reglu`."""
    config = _JINA_BERT | {"architectures": ["JinaBertForMaskedLM"], "feed_forward_type": feed_forward}
    save(folder, config, _layers(config))
    wordpiece().save_pretrained(folder)
    return save_modules(folder, "mean", normalize=False)


def embeddings_v2_code(folder: Path) -> str:
    """jinaai/jina-embeddings-v2-base-code: normed queries and keys, six heads, byte-level tokens."""
    config = _JINA_BERT | {
        "_name_or_path": "jinaai/jina-bert-v2-qk-post-norm", "architectures": ["JinaBertForMaskedLM"],
        "attn_implementation": "torch", "hidden_size": 192, "num_attention_heads": 6,
        "vocab_size": byte_level_bpe(folder, XLM_R, *ENDS),
    }  # fmt: skip
    config["auto_map"] = {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}
    save(folder, config, _layers(config))
    return save_modules(folder, "mean", normalize=False)


def reranker_v1(folder: Path) -> str:
    """jinaai/jina-reranker-v1-turbo-en: a pooler and one label."""
    code = "configuration_bert.JinaBertConfig", "modeling_bert.JinaBertForSequenceClassification"
    config = _JINA_BERT | {
        "_name_or_path": "jinaai/jina-reranker-v1-turbo-en",
        "architectures": ["JinaBertForSequenceClassification"],
        "auto_map": dict(zip(("AutoConfig", "AutoModelForSequenceClassification"), code, strict=True)),
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1,
        "vocab_size": byte_level_bpe(folder, XLM_R, *ENDS),
    }  # fmt: skip
    hidden, random = config["hidden_size"], RandomTensors(9)
    tensors = {f"bert.{name}": tensor for name, tensor in _layers(config).items()}
    tensors |= random.linear("bert.pooler.dense", hidden, hidden) | random.linear("classifier", 1, hidden)
    return save(folder, config, tensors)


def colbert_v1(folder: Path) -> str:
    """jinaai/jina-colbert-v1-en: Stanford ColBERT on a JinaBERT."""
    config = _JINA_BERT | {"architectures": ["HF_ColBERT"]}
    tensors = {f"bert.{name}": tensor for name, tensor in _layers(config).items()}
    tensors["linear.weight"] = 0.2 * RandomTensors(10)(32, config["hidden_size"])
    save(folder, config, tensors)
    wordpiece().save_pretrained(folder)
    write_artifact(folder, "[unused0]", "[unused1]", False, 32, query_maxlen=32, doc_maxlen=180)
    return str(folder)


def _layers(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The encoder's tensors, under the names of its code, of which there are two."""
    random, hidden, inner = RandomTensors(8), config["hidden_size"], config["intermediate_size"]
    named = {
        "embeddings.word_embeddings.weight": random.embedding(config["vocab_size"], hidden),
        "embeddings.token_type_embeddings.weight": random.embedding(config["type_vocab_size"], hidden),
        **random.norm("embeddings.LayerNorm", hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            named |= random.linear(f"{layer}attention.{part}", hidden, hidden)
        named |= random.norm(f"{layer}attention.output.LayerNorm", hidden)
        if "qk-post-norm" in config["_name_or_path"]:
            for part in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1"):
                named |= random.norm(f"{layer}{part}", hidden)
            gate, down, norm = "up_gated_layer", "mlp.down_layer", "layer_norm_2"
        else:
            gate, down, norm = "gated_layers", "mlp.wo", "mlp.layernorm"
        named |= {
            **random.linear(f"{layer}mlp.{gate}", 2 * inner, hidden, bias=False),
            **random.linear(f"{layer}{down}", hidden, inner),
            **random.norm(f"{layer}{norm}", hidden),
        }
    return named
