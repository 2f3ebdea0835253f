"""Loads cross-encoders: `*ForSequenceClassification` checkpoints, as CrossEncoder saves them or plain, and
encoders whose pooled vector a Dense module scores."""

import logging
from dataclasses import replace
from typing import Any

import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers.modeling_layers import GenericForSequenceClassification

from maxsimd.engine.checkpoint.encoders import SCORES, pooling_of, split_modules
from maxsimd.engine.checkpoint.files import CheckpointFiles, module_settings
from maxsimd.engine.checkpoint.heads import ClassifierHead, ModuleHead
from maxsimd.engine.checkpoint.model import PairRules, RoleRules, Task, is_causal
from maxsimd.engine.checkpoint.reading import LibraryReader, Reader, TemplateReader
from maxsimd.engine.checkpoint.reference import ClassifierReference, ModulesReference
from maxsimd.engine.checkpoint.settings import (
    Truncating,
    read_text_settings,
    set_activations,
    stated_activation,
)
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.checkpoint.weights import refuse_modules_not_finite
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.methods import METHODS

log = logging.getLogger(__name__)


def load_cross_encoder(
    path: str, files: CheckpointFiles, given: ScoreTemplate | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers, which finds the activation that its authors meant."""
    activation = stated_activation(path, files, options["trust_remote_code"])
    encoder = CrossEncoder(path, **options).eval()
    if activation is not None:
        encoder.activation_fn = activation
    if any(isinstance(module, Pooling) for module in encoder):
        return _scored_by_modules(path, files, encoder, given, options)
    model: Any = encoder.model
    if len(list(encoder)) > 1:
        names = ", ".join(type(module).__name__ for module in list(encoder)[1:])
        raise ModelLoadError(f"{path!r} has modules after its classifier that are not supported: {names}")
    backbone = model.base_model
    causal = is_causal(backbone)
    # Classifiers of language models look at the last token, in whichever directions they read.
    is_last = causal or isinstance(model, GenericForSequenceClassification)
    pooling = "last" if is_last else getattr(model.config, "classifier_pooling", "cls")
    if pooling not in METHODS:  # a method of the model's own
        pooling = "cls"
    named = model.config.id2label
    labels = tuple(str(named.get(i, f"LABEL_{i}")) for i in range(model.config.num_labels))
    head = ClassifierHead(model)
    task = Task(pooling, head, len(labels), False, ClassifierReference(model, encoder.tokenizer))
    return _parts(path, encoder, given, task, labels, model.config) | {
        "backbone": backbone,
        "causal": causal,
        "ending_pad_id": head.pad_id if head.passes_over_padding() else None,
    }


def _parts(
    path: str,
    encoder: CrossEncoder,
    given: ScoreTemplate | None,
    task: Task,
    labels: tuple[str, ...],
    config: Any,
) -> dict[str, Any]:
    template, prompt = prompted(encoder, given or template_of(encoder[0]))
    sigmoid = len(labels) == 1 or config.problem_type == "multi_label_classification"
    reader: Reader = LibraryReader(encoder)
    if given is not None and template is not None:
        reader = TemplateReader(encoder.tokenizer, template)
    return {
        "tokenizer": encoder.tokenizer,
        "tasks": {"classify": task},
        "score_task": "classify",
        "query": RoleRules(prompt),
        "text": RoleRules(prompt),
        "prompts": {name: each for name, each in encoder.prompts.items() if each},
        "activation": encoder.activation_fn,
        "probabilities": torch.sigmoid if sigmoid else torch.nn.Softmax(dim=-1),
        "labels": labels,
        "pairs": PairRules(truncation_of(path, encoder[0]), template),
        "reader": reader,
    }


def prompted(encoder: Any, template: ScoreTemplate | None) -> tuple[ScoreTemplate | None, str]:
    """The template with the prompt that a CrossEncoder uses by default as its instruction, where
    sentence-transformers makes messages of a pair; else the prompt, which stands before the query."""
    prompt = encoder.prompts.get(encoder.default_prompt_name) or ""
    if template is None or "message" not in encoder[0].modality_config:
        return template, prompt
    return replace(template, instruction=prompt or template.instruction), ""


def _scored_by_modules(
    path: str,
    files: CheckpointFiles,
    encoder: CrossEncoder,
    given: ScoreTemplate | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The parts of an encoder whose pooled vector of a pair becomes its scores by modules, the last a
    Dense."""
    modules = list(encoder)
    set_activations(
        path, modules, module_settings(path, files, options["revision"]), options["trust_remote_code"]
    )
    transformer, pooling, after = split_modules(path, modules)
    if not (after and isinstance(after[-1], Dense) and after[-1].module_output_name == SCORES):
        raise ModelLoadError(
            f"{path!r} is a CrossEncoder whose last module gives no {SCORES}; make it a Dense "
            f'with module_output_name "{SCORES}"'
        )
    refuse_modules_not_finite(path, modules[1:])
    named = transformer.config.id2label
    columns = after[-1].out_features
    labels = tuple(str(named[i]) if len(named) == columns else f"LABEL_{i}" for i in range(columns))
    reference = ModulesReference(modules, transformer.tokenizer, SCORES)
    head = ModuleHead(after, "sentence_embedding", SCORES)
    task = Task(pooling_of(pooling), head, columns, False, reference)
    parts = _parts(path, encoder, given, task, labels, transformer.config)
    return parts | {"backbone": transformer.auto_model}


def truncation_of(path: str, transformer: Any) -> Truncating:
    return read_text_settings(path, transformer, in_pairs=True).truncation or "longest_first"


def template_of(transformer: Any) -> ScoreTemplate | None:
    settings = dict((transformer.processing_kwargs or {}).get("chat_template") or {})
    restores_end = settings.pop("restore_suffix", True) is not False
    name = settings.pop("chat_template", None)
    template = getattr(transformer.processor, "chat_template", None) or transformer.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get(name or "default")
    elif name is not None:
        template = name
    if "message" not in transformer.modality_config or not template:
        return None
    variables = special_tokens(transformer.tokenizer) | settings
    in_parts = transformer.input_formatter.message_format == "structured"
    found = ScoreTemplate(
        (template,),
        variables=variables,
        in_parts=in_parts,
        restores_end=restores_end,
        by_messages=True,
    )
    try:
        found.check()
    except ModelLoadError as error:
        log.warning("the tokenizer joins pairs without its chat template: %s", error)
        return None
    return found


def special_tokens(tokenizer: Any) -> dict[str, str]:
    return {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
