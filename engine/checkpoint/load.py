"""Loads a checkpoint of any supported kind into a `LoadedModel`.

The first start of a checkpoint reads it with transformers and sentence-transformers. Where a recipe can say
what they made of it, later starts build the model from that, without importing them.
"""

import logging
import threading
from dataclasses import replace
from pathlib import Path

import torch

from maxsimd.engine.checkpoint.adjust import adjusted
from maxsimd.engine.checkpoint.backbone import token_rows
from maxsimd.engine.checkpoint.damage import damage_of, one_line, refuse_damaged_files
from maxsimd.engine.checkpoint.digests import check_digests, stay_offline
from maxsimd.engine.checkpoint.embedded import NAME, embedded_model_path
from maxsimd.engine.checkpoint.identity import identity_of
from maxsimd.engine.checkpoint.known_settings import check_settings
from maxsimd.engine.checkpoint.model import LoadedModel
from maxsimd.engine.checkpoint.reading import Reader
from maxsimd.engine.checkpoint.recipe import UnfitError, build, make_recipe
from maxsimd.engine.checkpoint.recipe_store import Source, find_recipe, source_of, store_recipe
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.errors import ModelLoadError

log = logging.getLogger(__name__)

# While a model loads, settings of the whole process are changed (transformers' log, how checkpoints are read,
# the number of threads), so models are loaded and prepared one after the other.
LOADING = threading.RLock()


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
            model = _with_token_rows(adjusted(_read(config, device, recheck), config))
            if name is not None and not is_local:
                unknown = check_settings(config)
            for line in unknown:
                log.warning("%s has unknown keys in %s; they may have no effect", name, line)
            model = replace(model, unknown_keys=unknown)
            return replace(model, fingerprint=identity_of(model)) if model.encodes_apart else model
        except ModelLoadError:
            raise
        except Exception as error:
            name = config.model or NAME
            raise damage_of(name) or ModelLoadError(f"cannot load {name!r}: {one_line(error)}") from error


def library_reader(config: EngineConfig) -> Reader:
    """What the checkpoint's own library makes of texts, for a model that was loaded without it. Raises
    ModelLoadError."""
    from maxsimd.engine.checkpoint.library import read_with_libraries

    with LOADING:
        try:
            reader = read_with_libraries(config, torch.device("cpu")).reader
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(f"cannot load {config.model or NAME!r}: {one_line(error)}") from error
    assert reader is not None
    return reader


def _with_token_rows(model: LoadedModel) -> LoadedModel:
    """The model with the number of its embeddings; texts with tokens beyond them are refused later. Raises
    ModelLoadError where every text has one, because the special tokens around texts are among them."""
    rows = token_rows(model.backbone)
    tokenizer = model.tokenizer.backend_tokenizer
    if rows is None:
        return model
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
    extra = sum(token_id >= rows for token_id in tokenizer.get_added_tokens_decoder())
    if extra:
        log.warning(
            "%s has no embedding for %d of the tokens that its tokenizer adds; texts with one are refused",
            model.name,
            extra,
        )
    return replace(model, token_rows=rows)


def _read(config: EngineConfig, device: torch.device, recheck: bool) -> LoadedModel:
    source = source_of(config)
    if source is not None and not recheck:
        model = _remembered(source, device)
        if model is not None:
            return model
    from maxsimd.engine.checkpoint.library import read_with_libraries

    model = read_with_libraries(config, device)
    source = source_of(config)  # again: more files of a hub's checkpoint may be here now
    return model if source is None else _remembering(source, model)


def _remembered(source: Source, device: torch.device) -> LoadedModel | None:
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


def _remembering(source: Source, model: LoadedModel) -> LoadedModel:
    """The model as the next start will build it, or as it is where no recipe can describe it."""
    try:
        made = make_recipe(model, source.folder, source.module_folders)
    except UnfitError as error:
        log.debug("%s is loaded with transformers at each start: %s", source.name, error)
        return model
    log.debug("compared with the libraries: %s", made.recipe.proof)
    store_recipe(source, made.recipe)
    return replace(made.model, compared=made.recipe.proof, reader=model.reader)
