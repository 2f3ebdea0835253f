"""The checkpoints that all systems are given: published shapes with random weights, MiniLM's tokeniser."""

import json
from pathlib import Path
from typing import Any

from maxsimd.engine.checkpoint.embedded import embedded_model_path

_COLBERT_DIM = 128


def save_cross_encoder(folder: Path) -> str:
    """A `BertForSequenceClassification` of MiniLM-L6 shape (6 layers, 384 wide)."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig.from_pretrained(embedded_model_path(), num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    return _with_tokenizer(folder)


def save_colbert(folder: Path) -> str:
    """A Stanford ColBERT of BERT-base shape (12 layers, 768 wide) with 128 dimensions, as
    colbert-ir/colbertv2.0 is saved."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config: Any = BertConfig(vocab_size=30522)
    config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(saved))
    weights = {f"bert.{name}": tensor for name, tensor in BertModel(config).state_dict().items()}
    weights["linear.weight"] = torch.randn(_COLBERT_DIM, config.hidden_size) * config.hidden_size**-0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    metadata = {
        "dim": _COLBERT_DIM,
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 32,
        "doc_maxlen": 512,
        "attend_to_mask_tokens": False,
        "mask_punctuation": True,
        "similarity": "cosine",
    }
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return _with_tokenizer(folder)


def _with_tokenizer(folder: Path) -> str:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(folder)
    return str(folder)
