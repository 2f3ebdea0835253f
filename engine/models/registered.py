"""Registers the architectures that transformers lacks with its Auto classes, on import."""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from maxsimd.engine.models import jina_bert, nomic_moe, xlm_roberta_flash


def _register(room: Any) -> None:
    """Makes a module's classes those of its type, for the rest of the process."""
    config = room.CONFIG
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, room.MODEL)
    if room.CLASSIFIER is not None:
        AutoModelForSequenceClassification.register(config, room.CLASSIFIER)
    register_checkpoint_conversion_mapping(config.model_type, room.CONVERSIONS)


for _room in (jina_bert, nomic_moe, xlm_roberta_flash):
    _register(_room)
