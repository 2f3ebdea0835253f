"""Loads cross-encoders: `*ForSequenceClassification` checkpoints, as CrossEncoder saves them or plain."""

from typing import Any

from sentence_transformers import CrossEncoder

from maxsimd.engine.checkpoint.backbone import is_causal
from maxsimd.engine.checkpoint.detect import CheckpointFiles
from maxsimd.engine.checkpoint.heads import ClassifierHead
from maxsimd.engine.checkpoint.model import RoleRules, Task
from maxsimd.engine.errors import ModelLoadError


def load_cross_encoder(path: str, files: CheckpointFiles, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers, which knows the activation that its authors meant.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    if not files.architecture.endswith("ForSequenceClassification"):
        raise ModelLoadError(
            f"{path!r} is a {files.architecture}, which has no classifier to score pairs with; "
            "serve it with --score-type bi-encoder or late-interaction, or name a "
            "*ForSequenceClassification checkpoint"
        )
    encoder = CrossEncoder(path, **options)
    model: Any = encoder.model
    backbone = getattr(model, model.base_model_prefix)
    pooling = "last" if is_causal(backbone) else getattr(model.config, "classifier_pooling", "cls")
    labels = tuple(model.config.id2label[i] for i in range(model.config.num_labels))
    return {
        "backbone": backbone,
        "tokenizer": encoder.tokenizer,
        "tasks": {"classify": Task(pooling, ClassifierHead(model), len(labels), False)},
        "score_task": "classify",
        "query": RoleRules(),
        "document": RoleRules(),
        "activation": encoder.activation_fn,
        "labels": labels,
    }
