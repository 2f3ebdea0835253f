"""Loads a checkpoint of any supported kind into a `LoadedModel`.

The first start of a checkpoint reads it with transformers and sentence-transformers. Where a recipe can say
what they made of it, later starts build the model from that, without importing them.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from maxsimd.engine.checkpoint.detect import COST_WISE, LAYERWISE
from maxsimd.engine.checkpoint.files import (
    check_digests,
    damage_of,
    embedded_model_path,
    one_line,
    refuse_damaged_files,
    stay_offline,
)
from maxsimd.engine.checkpoint.heads import FirstColumns, modules_of
from maxsimd.engine.checkpoint.known_settings import check_settings
from maxsimd.engine.checkpoint.model import LoadedModel, Task, token_rows
from maxsimd.engine.checkpoint.reading import Reader
from maxsimd.engine.checkpoint.recipe import UnfitError, build, make_recipe
from maxsimd.engine.checkpoint.recipe_store import Source, find_recipe, source_of, store_recipe
from maxsimd.engine.checkpoint.stages import LOADING
from maxsimd.engine.config import EMBEDDED_MODEL, EngineConfig, hybrid_weights_of
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.dispatch import merging_documents
from maxsimd.pooling.sparse import WordsHead

log = logging.getLogger(__name__)


def load_model(config: EngineConfig, device: torch.device, *, recheck: bool = False) -> LoadedModel:
    """Finds and reads the model that the configuration names, and moves it to the device.

    The heads are float32; the backbone keeps the precision of its file, which the caller may change. With
    `recheck` the model is read by the libraries and compared even if that has been done before. Raises
    ModelLoadError when there is no such model or it is of no supported kind.
    """
    with LOADING:
        if config.offline:
            path = Path(config.model if config.model is not None else embedded_model_path())
            stay_offline()
            check_digests(path.parent if path.is_file() else path)
        name = config.model
        unknown: tuple[str, ...] = ()
        if name is not None:
            refuse_damaged_files(name)
        try:
            # Files of the hub may not be here before the model is read.
            is_local = name is not None and Path(name).exists()
            if is_local:
                unknown = check_settings(config)
            model = _with_token_rows(configured(_read(config, device, recheck), config))
            if name is not None and not is_local:
                unknown = check_settings(config)
            for line in unknown:
                log.warning("%s has unknown keys in %s; they may have no effect", name, line)
            model = replace(model, unknown_keys=unknown)
            return replace(model, fingerprint=identity_of(model))
        except ModelLoadError:
            raise
        except Exception as error:
            name = config.model or EMBEDDED_MODEL
            raise damage_of(name) or ModelLoadError(f"cannot load {name!r}: {one_line(error)}") from error


def library_reader(config: EngineConfig) -> Reader:
    """The reader of the checkpoint's own library, for a model that was loaded without it. Raises
    ModelLoadError."""
    from maxsimd.engine.checkpoint.library import read_with_libraries

    with LOADING:
        try:
            reader = read_with_libraries(config, torch.device("cpu")).reader
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"cannot load {config.model or EMBEDDED_MODEL!r}: {one_line(error)}"
            ) from error
    assert reader is not None
    return reader


def _read(config: EngineConfig, device: torch.device, recheck: bool) -> LoadedModel:
    source = source_of(config)
    if source is not None and not recheck:
        model = _from_recipe(source, device)
        if model is not None:
            return model
    from maxsimd.engine.checkpoint.library import read_with_libraries

    model = read_with_libraries(config, device)
    _refuse_tokens_beyond(model, token_rows(model.backbone))  # before any text is run
    source = source_of(config)  # again: more files of a hub's checkpoint may be here now
    return model if source is None else _with_stored_recipe(source, model)


def _from_recipe(source: Source, device: torch.device) -> LoadedModel | None:
    """The model as the recipe of an earlier start builds it; None if there is none that fits."""
    recipe = find_recipe(source)
    if recipe is None:
        return None
    try:
        model = build(recipe, source.folder, device, source.name)
    except ModelLoadError:
        raise
    except Exception as error:
        log.warning("%s is loaded anew: its recipe failed: %s", source.name, error)
        return None
    log.debug("compared with the libraries before: %s", recipe.proof)
    return replace(model, compared=recipe.proof)


def _with_stored_recipe(source: Source, model: LoadedModel) -> LoadedModel:
    """The model as the next start will build it, or as it is where no recipe can describe it."""
    try:
        made = make_recipe(model, source.folder, source.module_folders)
    except UnfitError as error:
        log.debug("%s is loaded with transformers at each start: %s", source.name, error)
        return model
    log.debug("compared with the libraries: %s", made.recipe.proof)
    store_recipe(source, made.recipe)
    return replace(made.model, compared=made.recipe.proof, reader=model.reader)


def _with_token_rows(model: LoadedModel) -> LoadedModel:
    """The model with the number of its embeddings; texts with tokens beyond them are refused later. Raises
    ModelLoadError where every text has one."""
    rows = token_rows(model.backbone)
    if rows is None:
        return model
    _refuse_tokens_beyond(model, rows)
    added = model.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    extra = sum(token_id >= rows for token_id in added)
    if extra:
        log.warning(
            "%s has no embedding for %d of the tokens that its tokenizer adds; texts with one are refused",
            model.name,
            extra,
        )
    return replace(model, token_rows=rows)


def _refuse_tokens_beyond(model: LoadedModel, rows: int | None) -> None:
    """Raises ModelLoadError if special tokens around texts have no row among the embeddings."""
    if rows is None:
        return
    tokenizer = model.tokenizer.backend_tokenizer
    encodings = [tokenizer.encode("a")]
    if not model.encodes_apart:
        encodings.append(tokenizer.encode("a", "b"))
    # Without padding, which a step does not have.
    around = {
        token_id
        for encoding in encodings
        for token_id, is_seen in zip(encoding.ids, encoding.attention_mask, strict=True)
        if is_seen
    }
    for role in (model.query, model.document, model.text):
        around |= {
            int(each)
            for ids in (role.leading_ids, role.trailing_ids)
            for each in (() if ids is None else ids)
        }
        if role.expansion is not None:
            around.add(role.expansion.token_id)
    lacking = [tokenizer.id_to_token(token_id) for token_id in sorted(around) if token_id >= rows]
    if lacking:
        raise ModelLoadError(
            f"the tokenizer of {model.name!r} puts {', '.join(map(repr, lacking))} into every text, but the "
            f"model has only {rows} embeddings; use the tokenizer that the model was saved with"
        )


def configured(model: LoadedModel, config: EngineConfig) -> LoadedModel:
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
    if model.labels.count(asked) > 1:
        raise ModelLoadError(
            f"config.json of {model.name!r} gives the label {asked!r} twice; give each label a name of its "
            "own in id2label"
        )
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
            head = FirstColumns(task.head, dimensions, task.normalized)
            shortened[name] = replace(task, head=head, dim=dimensions)
    return shortened


# Numbers read of each weight: training changes some in nearly all weights, and reading
# whole checkpoints would make each start longer.
_NUMBERS = 64
_Named: TypeAlias = tuple[str, torch.Tensor]


def identity_of(model: LoadedModel) -> str:
    """A digest of what its embeddings or scores are made by, the same in every process and in every precision
    that the model may be run in. The weights must be as they were loaded."""
    task = model.tasks[model.score_task]
    columns = task.head.dimensions if isinstance(task.head, FirstColumns) else None
    head = [repr(module) for module in modules_of(task.head)]
    if isinstance(task.head, WordsHead):
        head.append(str(task.head))
    stated = model.architecture, model.similarity, task.pooling, task.dim, columns, head
    digest = hashlib.sha256(repr(stated).encode())
    named = [*_weights(model)]
    digest.update(repr([(name, tuple(weight.shape)) for name, weight in named]).encode())
    rows = [torch.atleast_1d(weight.detach())[:_NUMBERS] for _, weight in named]
    numbers = [each.reshape(-1)[:_NUMBERS].float() for each in rows]
    digest.update(torch.cat(numbers).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _weights(model: LoadedModel) -> Iterator[_Named]:
    modules = (*model.encoders, *modules_of(model.tasks[model.score_task].head))
    head = model.tasks[model.score_task].head
    if isinstance(head, WordsHead) and head.static_weights is not None:
        yield "static", head.static_weights
    for i, module in enumerate(modules):
        for name, weight in module.named_parameters():
            yield f"{i}.{name}", weight
