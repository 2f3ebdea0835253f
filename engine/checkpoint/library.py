"""Reads a checkpoint of any supported kind with transformers and sentence-transformers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging

from maxsimd.engine.checkpoint.adapters import with_base
from maxsimd.engine.checkpoint.adjust import score_template
from maxsimd.engine.checkpoint.backbone import is_causal, max_tokens, position_offset, uncounted_id
from maxsimd.engine.checkpoint.bi_encoder import load_bi_encoder
from maxsimd.engine.checkpoint.bidirectional_reranker import load_bidirectional_reranker
from maxsimd.engine.checkpoint.cross_encoder import load_cross_encoder
from maxsimd.engine.checkpoint.damage import damage_of, one_line
from maxsimd.engine.checkpoint.detect import (
    ENCODER_DECODERS,
    JINA_M0,
    LISTWISE,
    answers_in_words,
    detect_score_type,
    is_language_model,
    is_late_interaction,
    is_visual,
    scores_pooled,
    weighs_words,
    with_architecture,
)
from maxsimd.engine.checkpoint.direction import check_direction, says_both_ways, take_mask_away
from maxsimd.engine.checkpoint.embedded import NAME, embedded_model_path
from maxsimd.engine.checkpoint.encoder_decoder import load_encoder_decoder
from maxsimd.engine.checkpoint.files import (
    CheckpointFiles,
    find_file,
    read_files,
    refuse_missing_module_settings,
    refuse_missing_tokenizer,
)
from maxsimd.engine.checkpoint.fit import refusing_misfits
from maxsimd.engine.checkpoint.gguf.folder import from_gguf
from maxsimd.engine.checkpoint.heads import modules_of
from maxsimd.engine.checkpoint.language_model import load_language_model
from maxsimd.engine.checkpoint.late_interaction import load_late_interaction
from maxsimd.engine.checkpoint.layerwise import load_layerwise
from maxsimd.engine.checkpoint.listwise import load_listwise
from maxsimd.engine.checkpoint.lora import Adapter
from maxsimd.engine.checkpoint.m3 import find_layers, readable, with_layers
from maxsimd.engine.checkpoint.model import LoadedModel
from maxsimd.engine.checkpoint.projection import check_projection
from maxsimd.engine.checkpoint.quantized.tensors import quantized_weights
from maxsimd.engine.checkpoint.reference import takes_type_ids
from maxsimd.engine.checkpoint.retrained import LAYERWISE, LLAMA_RERANKER, has_projection
from maxsimd.engine.checkpoint.short_convolution import replace_short_convolutions
from maxsimd.engine.checkpoint.sparse_encoder import load_sparse_encoder
from maxsimd.engine.checkpoint.stored import StoredWeights
from maxsimd.engine.checkpoint.support import COLPALI_ENGINE, refuse_unsupported
from maxsimd.engine.checkpoint.tokenizer_code import follow_settings
from maxsimd.engine.checkpoint.translate import in_transformers_terms
from maxsimd.engine.checkpoint.visual.jina_m0 import load_jina_m0
from maxsimd.engine.checkpoint.visual.retrieval import load_retrieval
from maxsimd.engine.checkpoint.visual.two_towers import has_two_towers, load_two_towers
from maxsimd.engine.checkpoint.visual.vision_language import by_pillow
from maxsimd.engine.checkpoint.weights import hold_in_memory, refuse_missing_weights, refuse_pickles
from maxsimd.engine.config import EngineConfig, ScoreType
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.media.decoding import load_readers
from maxsimd.engine.models import registered  # noqa: F401 (transformers learns of our architectures)

# The first parts of the names of tensors that are read apart from the backbone, by architecture: the
# projections of ColBERT and of the listwise model.
_READ_APART = {"HF_ColBERT": frozenset({"linear"}), LISTWISE: frozenset({"projector"})}
# The projection of colpali-engine's models, of which sentence-transformers' modules have a copy.
_PROJECTION = frozenset({"custom_text_proj"})


def read_with_libraries(config: EngineConfig, device: torch.device) -> LoadedModel:
    """Finds and reads the model that the configuration names, and moves it to the device.

    The heads are float32; the backbone keeps the precision of its file. Options that change a loaded model
    are not applied. Raises ModelLoadError when there is no such model or it is of no supported kind.
    """
    path = config.model if config.model is not None else embedded_model_path()
    with from_gguf(path) as (folder, stored):
        if stored is not None:
            return _load_whole(folder, None, stored, config, device)
    with with_base(path, config.revision, config.offline) as (source, adapter):
        return _load_whole(source, adapter, None, config, device)


def _load_whole(
    path: str,
    adapter: Adapter | None,
    stored: StoredWeights | None,
    config: EngineConfig,
    device: torch.device,
) -> LoadedModel:
    """The model at a path, with what an adapter adds to it; its weights are in its files, or `stored`."""
    with _quiet_transformers():
        files = with_architecture(path, config.revision, read_files(path, config.revision))
    score_type = _score_type(config, files)
    layers = find_layers(path, config.revision, files)
    read = readable(path, files, layers, score_type, config.allow_pickle)
    refuse_unsupported(path, files, score_type, config.trust_remote_code)
    if stored is None:
        check = refuse_missing_weights if config.allow_pickle else refuse_pickles
        check(path, config.revision, files)
    refuse_missing_module_settings(path, config.revision, files)
    refuse_missing_tokenizer(path, config.revision, files)
    if stored is None:
        stored = quantized_weights(path, config.revision, files)
    options: dict[str, Any] = {
        "device": str(device),
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "model_kwargs": {"dtype": "auto", "use_safetensors": None if config.allow_pickle else True},
    }
    try:
        with (
            _quiet_transformers(),
            in_transformers_terms(path, config.revision, files, config.trust_remote_code) as source,
            refusing_misfits(
                path,
                _read_apart(files),
                partial(_complete_weights, files, adapter),
                stored,
                frozenset() if adapter is None else frozenset(adapter.whole),
            ),
        ):
            parts = _load_parts(source, files, score_type, config, options)
            if not config.trust_remote_code:
                follow_settings(path, config.revision, parts["tokenizer"])
            parts = with_layers(path, parts, read, score_type)
            parts["unread"] = tuple(sorted(layers[name].name for name in layers.keys() - read.keys()))
            if files.architecture in COLPALI_ENGINE and adapter is None:
                check_projection(path, config.revision, parts)
            model = _complete(config, score_type, files, parts)
            check_direction(path, files, model.causal, config.trust_remote_code)
    except ModelLoadError:
        raise
    except Exception as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        failed = ModelLoadError(f"cannot load {path!r} as {score_type.value}: {reason}")
        raise damage_of(path, find_file(path, "config.json", config.revision)) or failed from error
    return replace(model, stored_as="" if stored is None else stored.form)


def _score_type(config: EngineConfig, files: CheckpointFiles) -> ScoreType:
    if config.score_type != "auto":
        return ScoreType(config.score_type)
    if config.model is None:
        # On real text the embedded model ranks about as well by its token embeddings as by their mean.
        return ScoreType.LATE_INTERACTION
    return detect_score_type(files)


def _read_apart(files: CheckpointFiles) -> frozenset[str]:
    if files.architecture in COLPALI_ENGINE:
        return _PROJECTION
    if files.config_at_root and has_projection(files.config):
        return frozenset({"linear"})
    return _READ_APART.get(files.architecture, frozenset())


def _complete_weights(files: CheckpointFiles, adapter: Adapter | None, model: torch.nn.Module) -> None:
    """What is done to a model that fits its checkpoint, before anything is tried with it."""
    if adapter is not None:
        adapter.add_to(model)
    both_ways = says_both_ways(files)
    if both_ways:
        take_mask_away(model)
    # LFM2.5-ColBERT and -Embedding differ in this, by their code; configs for later transformers say it.
    said = files.config.get("conv_zero_padding")
    leaves_out = said if isinstance(said, bool) else not (both_ways and is_late_interaction(files))
    replace_short_convolutions(model, centred=both_ways, leaves_out_padding=leaves_out)


def _load_parts(
    path: str, files: CheckpointFiles, score_type: ScoreType, config: EngineConfig, options: dict[str, Any]
) -> dict[str, Any]:
    if score_type is ScoreType.LISTWISE:
        return load_listwise(path, options)
    if score_type is ScoreType.CROSS_ENCODER:
        template = score_template(config)
        if files.architecture == LLAMA_RERANKER:
            return load_bidirectional_reranker(path, files, template, options)
        if files.architecture in LAYERWISE:
            return load_layerwise(path, files, template, config, options)
        if files.architecture == JINA_M0:
            with by_pillow(path, files, options) as with_pillow:
                return load_jina_m0(path, template, with_pillow)
        if files.architecture in ENCODER_DECODERS:
            return load_encoder_decoder(path, files, template, options)
        if (is_language_model(files) or answers_in_words(files)) and not scores_pooled(files):
            with by_pillow(path, files, options) as with_pillow:
                return load_language_model(path, files, template, with_pillow)
        return load_cross_encoder(path, files, template, options)
    if score_type is ScoreType.SPARSE and weighs_words(files):
        return load_sparse_encoder(path, options)
    if is_visual(files):
        return load_retrieval(path, files.architecture, options)
    if has_two_towers(files):
        return load_two_towers(path, options)
    with by_pillow(path, files, options) as with_pillow:
        if score_type is ScoreType.LATE_INTERACTION and is_late_interaction(files):
            return load_late_interaction(path, files, with_pillow)
        return load_bi_encoder(path, files, score_type is ScoreType.LATE_INTERACTION, with_pillow)


def _complete(
    config: EngineConfig, score_type: ScoreType, files: CheckpointFiles, parts: dict[str, Any]
) -> LoadedModel:
    """Adds what is found out from the backbone itself."""
    backbone = parts["backbone"].eval().requires_grad_(False)
    heads = [module for task in parts["tasks"].values() for module in modules_of(task.head)]
    if vision := parts.get("vision"):
        load_readers()
    of_vision = [module.eval().requires_grad_(False) for module in vision.modules] if vision else []
    hold_in_memory([backbone, *heads, *of_vision])
    if getattr(parts["tokenizer"], "backend_tokenizer", None) is None:
        kind = type(parts["tokenizer"]).__name__
        raise ModelLoadError(f"the tokeniser, a {kind}, is not a fast one; save a tokenizer.json beside it")
    offset = parts.pop("position_offset") if "position_offset" in parts else position_offset(backbone)
    longest = max_tokens(backbone.config, parts["tokenizer"], offset)
    if config.max_model_len is not None:
        longest = min(longest, config.max_model_len)
    template = parts["pairs"].template if "pairs" in parts else None
    # Of pairs that a model card's template joins, the end of the document is left out, as in TemplateReader.
    follows_tokenizer = template is None or template.by_messages
    cuts_left = follows_tokenizer and parts["tokenizer"].truncation_side == "left"
    return LoadedModel(
        name=config.model or NAME,
        score_type=score_type,
        max_tokens=longest,
        causal=parts.pop("causal") if "causal" in parts else is_causal(backbone),
        position_offset=offset,
        uncounted_id=uncounted_id(backbone),
        takes_type_ids=takes_type_ids(backbone, parts["tokenizer"]),
        architecture=files.architecture,
        file_dtype=next(backbone.parameters()).dtype,
        truncation_side="left" if cuts_left else "right",
        **parts,
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silences progress bars and reports of weights that belong to a head and not to the backbone. While
    offline, also silences the hub's warnings, because the log has said so."""
    hub_verbosity = hub_logging.get_verbosity()
    if hub_constants.HF_HUB_OFFLINE:
        hub_logging.set_verbosity(logging.ERROR)
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        hub_logging.set_verbosity(hub_verbosity)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
