"""Loads cross-encoders: `*ForSequenceClassification` checkpoints, as CrossEncoder saves them or plain."""

from dataclasses import replace
from typing import Any, Literal

import torch
from sentence_transformers import CrossEncoder
from transformers.modeling_layers import GenericForSequenceClassification

from maxsimd.engine.checkpoint.backbone import is_causal
from maxsimd.engine.checkpoint.heads import ClassifierHead
from maxsimd.engine.checkpoint.model import PairRules, RoleRules, Task
from maxsimd.engine.checkpoint.reading import LibraryReader, TemplateReader
from maxsimd.engine.checkpoint.reference import ClassifierReference
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.methods import METHODS


def load_cross_encoder(path: str, given: ScoreTemplate | None, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers, which finds the activation that its authors meant.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    encoder = CrossEncoder(path, **options)
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
    labels = tuple(str(model.config.id2label[i]) for i in range(model.config.num_labels))
    head = ClassifierHead(model)
    template, prompt = prompted(encoder, given or template_of(encoder[0]))
    reference = ClassifierReference(model, encoder.tokenizer)
    return {
        "backbone": backbone,
        "causal": causal,
        "tokenizer": encoder.tokenizer,
        "tasks": {"classify": Task(pooling, head, len(labels), False, reference)},
        "score_task": "classify",
        "query": RoleRules(prompt),
        "document": RoleRules(),
        "text": RoleRules(prompt),
        "prompts": {name: each for name, each in encoder.prompts.items() if each},
        "ending_pad_id": head.pad_id if head.passes_over_padding() else None,
        "activation": encoder.activation_fn,
        "probabilities": _probabilities(model.config, len(labels)),
        "labels": labels,
        "pairs": PairRules(truncation_of(encoder[0]), template),
        "reader": TemplateReader(encoder.tokenizer, template) if given and template else LibraryReader(encoder),
    }


def prompted(encoder: Any, template: ScoreTemplate | None) -> tuple[ScoreTemplate | None, str]:
    """The template with the prompt that a CrossEncoder uses by default as its instruction, where
    sentence-transformers makes messages of a pair; else the prompt, which stands before the query."""
    prompt = encoder.prompts.get(encoder.default_prompt_name) or ""
    if template is None or "message" not in encoder[0].modality_config:
        return template, prompt
    return replace(template, instruction=prompt or template.instruction), ""


def truncation_of(transformer: Any) -> Literal["longest_first", "only_second"]:
    """How sentence-transformers is configured to cut pairs that are too long."""
    only_second = _settings(transformer, "text").get("truncation") == "only_second"
    return "only_second" if only_second else "longest_first"


def template_of(transformer: Any) -> ScoreTemplate | None:
    """The chat template by which sentence-transformers joins a pair, if there is one."""
    settings = _settings(transformer, "chat_template")
    name = settings.pop("chat_template", None)
    template = getattr(transformer.processor, "chat_template", None) or transformer.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get(name or "default")
    elif name is not None:
        template = name
    if "message" not in transformer.modality_config or not template:
        return None
    variables = special_tokens(transformer.tokenizer) | settings
    variables.pop("restore_suffix", None)
    in_parts = transformer.input_formatter.message_format == "structured"
    found = ScoreTemplate((template,), variables=variables, in_parts=in_parts)
    try:
        found.check()
    except ModelLoadError:  # a template for chats, which names neither query nor document
        return None
    return found


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """The special tokens that a chat template may name."""
    return {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }


def _settings(transformer: Any, name: str) -> dict[str, Any]:
    settings = transformer.processing_kwargs or {}
    return dict(settings.get(name) or {})


def _probabilities(config: Any, labels: int) -> Any:
    if labels == 1 or config.problem_type == "multi_label_classification":
        return torch.sigmoid
    return torch.nn.Softmax(dim=-1)
