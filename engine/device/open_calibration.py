"""Reads the calibration that a configuration names, if it was made of the same model."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from maxsimd.engine.cache.fingerprint import (
    digest_tensors,
    fingerprint,
    saved_buffers,
    settings_of,
    stated_tokenizer,
)
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.checkpoint.heads import modules_of
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution import choose_device
from maxsimd.engine.scoring.calibration import Calibration


def model_digest(model: LoadedModel, config: EngineConfig) -> str:
    """The digest of all that scores depend on, but for rounding: weights, tokeniser, and how texts are read
    and compared. The backbone must be as it was loaded."""
    backbone: Any = model.backbone
    task, template = model.tasks[model.score_task], model.pairs.template
    heads = enumerate(modules_of(task.head))
    stated = {
        "architecture": model.architecture,
        "settings": settings_of(backbone.config)[0],
        "tokenizer": stated_tokenizer(model.tokenizer),
        "prompts": (model.query.prompt, model.document.prompt, model.instruction),
        "template": template and [(each.name, getattr(template, each.name)) for each in fields(template)],
        "truncation": (model.truncation_side, model.pairs.truncation),
        "padding": (model.uncounted_id, model.ending_pad_id),
        # Softmax or a sigmoid of each label; a function's repr holds its address.
        "label": (model.score_label, model.probabilities is torch.sigmoid),
        "lengths": (model.max_tokens, model.query.max_tokens, model.document.max_tokens),
        "pooling": (task.pooling, task.dim, config.doc_token_pooling),
        "heads": [repr(module) for module in modules_of(task.head)],
        "similarity": _similarity(model),
    }
    weights = {
        "backbone": digest_tensors([*backbone.named_parameters(), *saved_buffers(backbone)]),
        "head": digest_tensors(
            (f"{i}.{name}", tensor) for i, module in heads for name, tensor in module.named_parameters()
        ),
    }
    return fingerprint({name: repr(value).encode() for name, value in stated.items()} | weights).hex()


def _similarity(model: LoadedModel) -> object:
    return (model.similarity, model.hybrid_weights) if model.similarity == "hybrid" else model.similarity


def digest_of(config: EngineConfig) -> str:
    """That of the model which a configuration names; it is loaded for this. Raises ModelLoadError."""
    return model_digest(load_model(config, choose_device(config.device)), config)


def open_calibration(config: EngineConfig, model: LoadedModel) -> Calibration | None:
    """None where none is named. Raises ModelLoadError for a file that cannot be read, or is another
    model's."""
    if config.calibration is None:
        return None
    try:
        calibration = Calibration.read(Path(config.calibration).expanduser())
    except (OSError, ValueError, RuntimeError) as error:  # the last where there is no home folder
        raise ModelLoadError(
            f"the calibration {config.calibration!r} cannot be read: {error}; make one with maxsimd calibrate"
        ) from error
    if calibration.model != model_digest(model, config):
        raise ModelLoadError(
            f"the calibration {config.calibration!r} is of another model, or of other prompts or dimensions; "
            "make one with maxsimd calibrate and the options of this server"
        )
    return calibration
