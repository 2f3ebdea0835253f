"""Loads a checkpoint of any supported kind into a `LoadedModel`.

The first start of a checkpoint reads it with transformers and sentence-transformers. Where a recipe can say
what they made of it, later starts build the model from that, without importing them.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from maxsimd.engine.checkpoint.detect import COST_WISE, LAYERWISE
from maxsimd.engine.checkpoint.files import (
    check_digests,
    damage_of,
    embedded_model_path,
    one_line,
    refuse_damaged_files,
    stay_offline,
    warn_of_unknown_modules,
)
from maxsimd.engine.checkpoint.heads import FirstColumns, modules_of
from maxsimd.engine.checkpoint.known_settings import check_settings
from maxsimd.engine.checkpoint.model import TOKEN_CLASSIFY, LoadedModel, token_rows
from maxsimd.engine.checkpoint.reading import Reader
from maxsimd.engine.checkpoint.recipe import UnfitError, build, make_recipe
from maxsimd.engine.checkpoint.recipe_store import find_recipe, keep, source_of
from maxsimd.engine.checkpoint.stages import LOADING
from maxsimd.engine.config import EMBEDDED_MODEL, EngineConfig, ScoreType, hybrid_weights_of
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
    name = EMBEDDED_MODEL if config.model is None else config.model
    with LOADING, _naming(name):
        path = Path(embedded_model_path() if config.model is None else name)
        if config.offline:
            stay_offline()
            check_digests(path.parent if path.is_file() else path)
        if config.model is not None:
            refuse_damaged_files(name)
        # Files of the hub may not be here before the model is read.
        unknown = check_settings(config) if path.exists() else ()
        model = _with_token_rows(configured(_read(config, device, recheck), config))
        if not path.exists():
            unknown = check_settings(config)
            if model.score_type is ScoreType.BI_ENCODER:
                warn_of_unknown_modules(name, config.revision)
        for line in unknown:
            log.warning("%s has unknown keys in %s; they may have no effect", name, line)
        model = replace(model, unknown_keys=unknown)
        return replace(model, fingerprint=identity_of(model))


@contextmanager
def _naming(model: str) -> Iterator[None]:
    """Turns errors of libraries into a ModelLoadError that names the model."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        raise damage_of(model) or ModelLoadError(f"cannot load {model!r}: {one_line(error)}") from error


def library_reader(config: EngineConfig) -> Reader:
    """The reader of the checkpoint's own library, for a model that was loaded without it. Raises
    ModelLoadError."""
    from maxsimd.engine.checkpoint.library import read_with_libraries

    with LOADING, _naming(config.model or EMBEDDED_MODEL):
        reader = read_with_libraries(config, torch.device("cpu")).reader
    assert reader is not None
    return reader


def _read(config: EngineConfig, device: torch.device, recheck: bool) -> LoadedModel:
    """Builds the model by the recipe of an earlier start. Reads it with the libraries if there is none, or
    none that fits, and stores a recipe if one can describe it."""
    source = source_of(config)
    recipe = None if source is None or recheck else find_recipe(source)
    if source is not None and recipe is not None:
        try:
            model = build(recipe, source.folder, device, source.name)
        except ModelLoadError:
            raise
        except Exception as error:
            log.warning("%s is loaded anew: its recipe failed: %s", source.name, error)
        else:
            log.debug("compared with the libraries before: %s", recipe.proof)
            return replace(model, compared=recipe.proof)
    from maxsimd.engine.checkpoint.library import read_with_libraries

    model = read_with_libraries(config, device)
    _refuse_tokens_beyond(model)  # before any text is run
    source = source_of(config)  # again: more files of a hub's checkpoint may be here now
    if source is None:
        return model
    try:
        recipe, made = make_recipe(model, source.folder, source.module_folders)
    except UnfitError as error:
        log.debug("%s is loaded with transformers at each start: %s", source.name, error)
        return model
    log.debug("compared with the libraries: %s", recipe.proof)
    keep(f"{source.key}.json", msgspec.json.encode(recipe))
    return replace(made, compared=recipe.proof, reader=model.reader)


def _with_token_rows(model: LoadedModel) -> LoadedModel:
    """The model with the number of its embeddings; texts with tokens beyond them are refused later. Raises
    ModelLoadError where every text has one."""
    rows = _refuse_tokens_beyond(model)
    if rows is None:
        return model
    added = model.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    if extra := sum(token_id >= rows for token_id in added):
        log.warning(
            "%s has no embedding for %d of the tokens that its tokenizer adds; texts with one are refused",
            model.name,
            extra,
        )
    return replace(model, token_rows=rows)


def _refuse_tokens_beyond(model: LoadedModel) -> int | None:
    """Returns the number of embeddings. Raises ModelLoadError if special tokens around texts have none."""
    rows = token_rows(model.backbone)
    if rows is None:
        return None
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
        for ids in (role.leading_ids, role.trailing_ids):
            around.update(() if ids is None else map(int, ids))
        if role.expansion is not None:
            around.add(role.expansion.token_id)
    lacking = [tokenizer.id_to_token(token_id) for token_id in sorted(around) if token_id >= rows]
    if lacking:
        raise ModelLoadError(
            f"the tokenizer of {model.name!r} puts {', '.join(map(repr, lacking))} into every text, but the "
            f"model has only {rows} embeddings; use the tokenizer that the model was saved with"
        )
    return rows


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
    if config.query_prompt is not None and model.score_task == TOKEN_CLASSIFY:
        raise ModelLoadError("token classifiers read texts as they are; leave out query_prompt")
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
        tasks = dict(model.tasks)
        for name in {"embed", "token_embed"} & tasks.keys():
            if config.dimensions > (dim := tasks[name].dim):
                raise ModelLoadError(f"dimensions={config.dimensions} is more than the {dim} of embeddings")
            head = FirstColumns(tasks[name].head, config.dimensions, tasks[name].normalized)
            tasks[name] = replace(tasks[name], head=head, dim=config.dimensions)
        model = replace(model, tasks=tasks)
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


# Numbers read of each weight: training changes some in nearly all weights, and reading
# whole checkpoints would make each start longer.
_NUMBERS = 64


def identity_of(model: LoadedModel) -> str:
    """A digest of what its embeddings or scores are made by, the same in every process and in every precision
    that the model may be run in. The weights must be as they were loaded."""
    task = model.tasks[model.score_task]
    columns = task.head.dimensions if isinstance(task.head, FirstColumns) else None
    of_head = modules_of(task.head)
    head = [repr(module) for module in of_head]
    named: list[tuple[str, torch.Tensor, torch.Tensor]] = [
        (f"{i}.{name}", weight, torch.atleast_1d(weight.detach())[:_NUMBERS].reshape(-1)[:_NUMBERS])
        for i, module in enumerate([*model.encoders, *of_head])
        for name, weight in module.named_parameters()
        # A pooler is random where the files have none. One that counts is the head's, too.
        if i > 0 or not name.startswith("pooler.")
    ]
    if isinstance(task.head, WordsHead):
        head.append(str(task.head))
        if (static := task.head.static_weights) is not None:
            named.insert(0, ("static", static, static))  # whole: the first words often weigh alike
    stated = model.architecture, model.similarity, task.pooling, task.dim, columns, head
    digest = hashlib.sha256(repr(stated).encode())
    digest.update(repr([(name, tuple(weight.shape)) for name, weight, _ in named]).encode())
    digest.update(torch.cat([numbers.float() for _, _, numbers in named]).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
