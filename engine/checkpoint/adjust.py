"""What the configuration changes about a loaded model: prompts, instruction, dimensions, token pooling."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from maxsimd.engine.checkpoint.heads import FirstColumns
from maxsimd.engine.checkpoint.model import LoadedModel, Task
from maxsimd.engine.checkpoint.retrained import COST_WISE, LAYERWISE
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.config import EngineConfig, hybrid_weights_of
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.dispatch import merging_documents


def score_template_file(config: EngineConfig) -> Path | None:
    """The file that `score_template` names, None where it is Jinja itself or not given."""
    given = config.score_template
    return None if given is None or "{{" in given or "{%" in given else Path(given)


def score_template(config: EngineConfig) -> ScoreTemplate | None:
    """The template that the configuration names, as Jinja or as a file of it. Raises ModelLoadError."""
    given = config.score_template
    if given is None:
        return None
    file = score_template_file(config)
    if file is not None and not file.is_file():
        raise ModelLoadError(f"the score template {given!r} is neither Jinja nor a file")
    template = ScoreTemplate((given if file is None else file.read_text(encoding="utf-8"),))
    template.check()
    return template


def adjusted(model: LoadedModel, config: EngineConfig) -> LoadedModel:
    """The model as configured. Raises ModelLoadError for a setting that does not apply to it."""
    if config.score_template is not None and model.pairs.template is None:
        raise ModelLoadError("score_template is for models that read query and document together")
    if config.cutoff_layer is not None and model.architecture not in LAYERWISE:
        raise ModelLoadError("cutoff_layer is for models with a score behind each layer")
    asks = config.compress_ratio != 1 or config.compress_layers is not None
    if asks and model.architecture != COST_WISE:
        raise ModelLoadError(
            "compress_ratio and compress_layers are for models that were trained with token compression "
            "(bge-reranker-v2.5-gemma2-lightweight)"
        )
    if config.query_prompt is not None and model.listwise is not None:
        raise ModelLoadError("listwise models do not support query_prompt; use instruction instead")
    if config.document_prompt is not None and not model.encodes_apart:
        raise ModelLoadError(
            "document_prompt needs a model that encodes queries and documents separately; leave it out"
        )
    if config.query_prompt is not None:
        model = replace(model, query=replace(model.query, prompt=config.query_prompt))
    if config.document_prompt is not None:
        model = replace(model, document=replace(model.document, prompt=config.document_prompt))
    if config.instruction is not None:
        if not model.takes_instruction:
            raise ModelLoadError(f"{model.name!r} takes no instruction")
        model = replace(model, instruction=config.instruction)
    if config.doc_token_pooling is not None:
        if model.score_task != "token_embed":
            raise ModelLoadError("doc_token_pooling is for late interaction")
        # A text begins with a token that stands for all of it, a page with none; nor is it among bge-m3's.
        left_alone = 1 if model.vision is None and model.document.pool_first else 0
        pooling = merging_documents(config.doc_token_pooling, left_alone)
        model = replace(model, token_pooling=pooling)
    if config.hybrid_weights is not None:
        if model.similarity != "hybrid":
            raise ModelLoadError(
                'hybrid_weights is for hybrid scores: set score_type="hybrid", or leave it out'
            )
        model = replace(model, hybrid_weights=hybrid_weights_of(config.hybrid_weights))
    model = replace(model, score_label=_score_label(model, config.score_label))
    if config.dimensions is not None:
        if model.items_have_ids:
            raise ModelLoadError(
                "dimensions is for vectors of a fixed size, not for sparse ones; leave it out"
            )
        model = replace(model, tasks=_shortened(model.tasks, config.dimensions))
    return model


def _score_label(model: LoadedModel, asked: str | None) -> int | None:
    """The label that stands for relevance: the one that is asked for, else yes. Raises ModelLoadError for a
    label that the model does not have."""
    has_several = model.score_task == "classify" and len(model.labels) > 1
    if asked is None:
        named_yes = [i for i, label in enumerate(model.labels) if label.casefold() == "yes"]
        return named_yes[0] if has_several and len(named_yes) == 1 else None
    if not has_several:
        raise ModelLoadError("score_label is for classifiers of several labels; leave it out")
    if asked not in model.labels:
        named = ", ".join(model.labels)
        raise ModelLoadError(f"score_label {asked!r} is not a label of {model.name!r}; use one of: {named}")
    return model.labels.index(asked)


def _shortened(tasks: Mapping[str, Task], dimensions: int) -> dict[str, Task]:
    shortened = dict(tasks)
    for name in ("embed", "token_embed"):
        if name in tasks:
            if dimensions > tasks[name].dim:
                raise ModelLoadError(
                    f"dimensions={dimensions} is more than the {tasks[name].dim} of embeddings"
                )
            task = tasks[name]
            head = FirstColumns(task.head, dimensions, task.normalised)
            shortened[name] = replace(task, head=head, dim=dimensions)
    return shortened
