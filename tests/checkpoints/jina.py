"""Jina's encoders with code of their own, tensor by tensor as they are published."""

import json
from pathlib import Path
from typing import Any

from tests.checkpoints.cross_encoders import XLM_R
from tests.checkpoints.published import RandomTensors
from tests.checkpoints.tokenizers import unigram
from tests.checkpoints.weights import SIZES, save_tensors


def reranker_v2(folder: Path) -> str:
    """jinaai/jina-reranker-v2-base-multilingual: XLM-RoBERTa in the layout of its authors' code. Its config
    names no type of model."""
    config: dict[str, Any] = SIZES | {
        "architectures": ["XLMRobertaForSequenceClassification"],
        "attention_probs_dropout_prob": 0.1,
        "auto_map": {
            "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
            "AutoModelForSequenceClassification": "modeling_xlm_roberta.XLMRobertaForSequenceClassification",
        },
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514,
        "output_past": True,
        "pad_token_id": 1,
        "position_embedding_type": "absolute",
        "type_vocab_size": 1,
        "use_cache": False,
        "use_flash_attn": True,
        "vocab_size": unigram(folder, XLM_R, "<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    }
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
    tensors = {f"roberta.{name}": tensor for name, tensor in named.items()}
    tensors |= random.linear("classifier.dense", hidden, hidden)
    tensors |= random.linear("classifier.out_proj", 1, hidden)
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(tensors, folder)
    return str(folder)
