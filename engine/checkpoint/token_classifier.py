"""Loads token classifiers: `*ForTokenClassification` checkpoints, as transformers saves them."""

from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from maxsimd.engine.checkpoint.cross_encoder import labels_of, read_bare
from maxsimd.engine.checkpoint.heads import TokenClassifierHead
from maxsimd.engine.checkpoint.model import TOKEN_CLASSIFY, Task
from maxsimd.engine.checkpoint.reading import TokenizerReader
from maxsimd.engine.checkpoint.reference import TokenClassifierReference


def load_token_classifier(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with transformers. Its classifier is the head of each token's row."""
    trusts_code = options["trust_remote_code"]
    model, tokenizer = read_bare(path, AutoModelForTokenClassification, options, trusts_code)
    labels = labels_of(model.config)
    reference = TokenClassifierReference(model, tokenizer)
    return {
        "backbone": model.base_model,
        "tokenizer": tokenizer,
        "tasks": {TOKEN_CLASSIFY: Task("all", TokenClassifierHead(model), len(labels), False, reference)},
        "score_task": TOKEN_CLASSIFY,
        "labels": labels,
        "probabilities": torch.nn.Softmax(dim=-1),
        "reader": TokenizerReader(tokenizer),
    }
