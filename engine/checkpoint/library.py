"""Reads a checkpoint of any supported kind with transformers and sentence-transformers, or refuses it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from huggingface_hub import constants as hub_constants
from huggingface_hub.utils import logging as hub_logging
from transformers import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from maxsimd.engine.checkpoint.adapters import Adapter, with_base
from maxsimd.engine.checkpoint.cross_encoder import load_answering, load_cross_encoder
from maxsimd.engine.checkpoint.detect import (
    ENCODER_DECODERS,
    JINA_M0,
    LAYERWISE,
    LISTWISE,
    LLAMA_RERANKER,
    RETRIEVAL,
    STANFORD,
    answers_in_words,
    detect_score_type,
    follow_stanford,
    is_language_model,
    is_late_interaction,
    is_visual,
    says_both_ways,
    scores_pooled,
    supported_architectures,
    weighs_words,
    with_architecture,
)
from maxsimd.engine.checkpoint.encoders import load_bi_encoder, load_late_interaction, load_sparse_encoder
from maxsimd.engine.checkpoint.files import (
    CheckpointFiles,
    damage_of,
    embedded_model_path,
    find_file,
    one_line,
    read_files,
    refuse_incomplete,
)
from maxsimd.engine.checkpoint.gguf import ANSWERS_ALONE, from_gguf
from maxsimd.engine.checkpoint.heads import Dense, modules_of
from maxsimd.engine.checkpoint.known_settings import UNSUPPORTED_MODULES
from maxsimd.engine.checkpoint.language_model import load_language_model
from maxsimd.engine.checkpoint.m3 import find_layers, readable, with_layers
from maxsimd.engine.checkpoint.model import LoadedModel, is_causal, max_tokens, position_offset, uncounted_id
from maxsimd.engine.checkpoint.quantized import format_of, quantized_weights
from maxsimd.engine.checkpoint.reading import without_messages
from maxsimd.engine.checkpoint.reference import takes_type_ids
from maxsimd.engine.checkpoint.rerankers import (
    load_bidirectional_reranker,
    load_jina_m0,
    load_layerwise,
    load_listwise,
)
from maxsimd.engine.checkpoint.settings import follow_settings
from maxsimd.engine.checkpoint.templates import score_template
from maxsimd.engine.checkpoint.token_classifier import load_token_classifier
from maxsimd.engine.checkpoint.translate import (
    has_projection,
    in_transformers_terms,
    language_model_translation,
    runs_as,
)
from maxsimd.engine.checkpoint.visual_loaders import (
    by_pillow,
    has_two_towers,
    load_retrieval,
    load_two_towers,
    reads_pictures,
)
from maxsimd.engine.checkpoint.weights import (
    StoredWeights,
    hold_in_memory,
    read_tensors,
    refuse_weights,
    refusing_misfits,
)
from maxsimd.engine.config import EMBEDDED_MODEL, EngineConfig, ScoreType
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.media import pillow
from maxsimd.engine.models import registered  # noqa: F401 (transformers learns of our architectures)
from maxsimd.engine.models.lfm2 import replace_short_convolutions

log = logging.getLogger(__name__)
# The projection of colpali-engine's models, of which sentence-transformers' modules have a copy.
_PROJECTION = "custom_text_proj"
# colpali-engine's classes. Its saves have the names of their base models, to which sentence-transformers
# would add a random projection.
COLPALI_ENGINE = frozenset(
    {
        *("ColGemma3", "ColIdefics3", "ColModernVBert", "ColPali", "ColQwen2", "ColQwen2_5"),
        *("ColQwen3", "ColQwen3_5"),
    }
)
# The keys of config.json that count layers.
_LAYERS = (
    *("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers"),
)
_MOST_LAYERS = 1_000


def read_with_libraries(config: EngineConfig, device: torch.device) -> LoadedModel:
    """Finds and reads the model that the configuration names, and moves it to the device.

    The heads are float32; the backbone keeps the precision of its file. Options that change a loaded model
    are not applied. Raises ModelLoadError when there is no such model or it is of no supported kind.
    """
    path = config.model if config.model is not None else embedded_model_path()
    # Our kernels for bfloat16 multiply weights in their blocks.
    in_blocks = device.type == "cpu" and config.kernels == "auto" and config.dtype in ("auto", "bfloat16")
    with from_gguf(path, in_blocks) as (folder, stored):
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
        read_config = read_files(path, config.revision)
        _refuse_too_many_layers(path, read_config.config)
        files = with_architecture(path, config.revision, read_config)
    if config.score_type != "auto":
        score_type = ScoreType(config.score_type)
    else:  # on real text the embedded model ranks about as well by its token embeddings as by their mean
        score_type = ScoreType.LATE_INTERACTION if config.model is None else detect_score_type(files)
    if score_type is ScoreType.LATE_INTERACTION:
        files = follow_stanford(files)
    layers = find_layers(path, config.revision, files)
    read = readable(path, files, layers, score_type, config.allow_pickle)
    refuse_unsupported(path, files, score_type, config.trust_remote_code)
    if stored is None:
        refuse_weights(path, config.revision, files, config.allow_pickle)
        stored = quantized_weights(path, config.revision, files)
    refuse_incomplete(path, config.revision, files)
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
                _check_projection(path, config.revision, _PROJECTION, parts)
            if files.architecture == STANFORD and files.modules and parts["score_task"] == "token_embed":
                _check_projection(path, config.revision, "linear", parts)
            model = _complete(config, score_type, files, parts)
            _check_direction(path, files, model.causal, config.trust_remote_code)
    except ModelLoadError:
        raise
    except Exception as error:
        reason = _reason(path, files, config.revision, error)
        failed = ModelLoadError(f"cannot load {path!r} as {score_type.value}: {reason}")
        raise damage_of(path, find_file(path, "config.json", config.revision)) or failed from error
    return replace(model, stored_as="" if stored is None else stored.form)


def _reason(path: str, files: CheckpointFiles, revision: str | None, error: Exception) -> str:
    """The message of a library's error; its cause where the library hides that."""
    if isinstance(error, KeyError):
        for key, value in files.config.items():
            if value == error.args[0]:
                known = "which transformers does not know; use one that it does"
                return f"config.json sets {key} to {error}, {known}"
        return f"{error} is missing"
    said = one_line(error)
    if "Unrecognized processing class" in said:
        try:
            transformers.AutoTokenizer.from_pretrained(path, revision=revision)
        except Exception as inner:
            remedy = "check tokenizer_class in tokenizer_config.json"
            return f"its tokenizer cannot be read ({one_line(inner)}); {remedy}"
    if "Padding_idx" in said:
        return (
            "config.json has a pad_token_id beyond its vocab_size, or none; set the id of the padding token"
        )
    return said


def _read_apart(files: CheckpointFiles) -> frozenset[str]:
    """The first parts of the names of tensors that are read apart from the backbone: of projections."""
    named = {STANFORD: "linear", LISTWISE: "projector"} | dict.fromkeys(COLPALI_ENGINE, _PROJECTION)
    is_projected = files.config_at_root and has_projection(files.config)
    found = "linear" if is_projected else named.get(files.architecture)
    return frozenset() if found is None else frozenset({found})


def _complete_weights(files: CheckpointFiles, adapter: Adapter | None, model: Any) -> None:
    """Adds an adapter to a model that fits its checkpoint, and has it attend in the directions that the
    checkpoint says, before anything is tried with it."""
    if adapter is not None:
        adapter.add_to(model)
    both_ways = says_both_ways(files.config)
    if both_ways and is_causal(backbone := getattr(model, "base_model", model)):
        # transformers makes no causal mask where the config says so; kernels that are given no mask ask the
        # attention modules.
        backbone.config.is_causal = False
        for module in backbone.modules():
            if getattr(module, "is_causal", None) is True:
                module.is_causal = False
    # LFM2.5-ColBERT and -Embedding differ in this, by their code; configs for later transformers say it.
    said = files.config.get("conv_zero_padding")
    leaves_out = said if isinstance(said, bool) else not (both_ways and is_late_interaction(files))
    replace_short_convolutions(model, centered=both_ways, leaves_out_padding=leaves_out)


def _load_parts(
    path: str, files: CheckpointFiles, score_type: ScoreType, config: EngineConfig, options: dict[str, Any]
) -> dict[str, Any]:
    """The parts of a `LoadedModel` that depend on the kind of checkpoint."""
    if score_type is ScoreType.LISTWISE:
        return load_listwise(path, options)
    if score_type is ScoreType.LANGUAGE_MODEL:
        return load_language_model(path, options)
    if score_type is ScoreType.CROSS_ENCODER:
        template = score_template(config)
        if files.architecture == LLAMA_RERANKER:
            return load_bidirectional_reranker(path, files, template, options)
        if files.architecture in LAYERWISE:
            return load_layerwise(path, files, template, config, options)
        if files.architecture == JINA_M0:
            with by_pillow(path, files, options) as with_pillow:
                return load_jina_m0(path, template, with_pillow)
        if not files.modules and (is_language_model(files) or files.architecture in ENCODER_DECODERS):
            return load_answering(config.model or path, path, files, template, options)
        with by_pillow(path, files, options) as with_pillow:
            return load_cross_encoder(path, files, template, with_pillow)
    if score_type is ScoreType.TOKEN_CLASSIFIER:
        return load_token_classifier(path, options)
    if score_type is ScoreType.SPARSE and weighs_words(files):
        if not files.modules and find_file(path, "idf.json", config.revision) is not None:
            log.warning(
                "%s has an idf.json, which is not read: queries are read by the model, as documents are. If "
                "they are to be looked up there, name a version with a Router in its modules.json",
                config.model,
            )
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
    backbone = parts["backbone"]
    encoders = [backbone]
    if vision := parts.get("vision"):
        pillow()  # imported now, so that no request waits for it
        encoders += vision.modules
    for module in encoders:
        module.eval().requires_grad_(False)
    heads = [module for task in parts["tasks"].values() for module in modules_of(task.head)]
    hold_in_memory([*encoders, *heads])
    if getattr(parts["tokenizer"], "backend_tokenizer", None) is None:
        kind = type(parts["tokenizer"]).__name__
        raise ModelLoadError(f"the tokenizer, a {kind}, is not a fast one; save a tokenizer.json beside it")
    if "position_offset" not in parts:
        parts["position_offset"] = position_offset(backbone)
    if "causal" not in parts:
        parts["causal"] = is_causal(backbone)
    longest = max_tokens(backbone.config, parts["tokenizer"], parts["position_offset"])
    if config.max_model_len is not None:
        longest = min(longest, config.max_model_len)
    template = parts["pairs"].template if "pairs" in parts else None
    # A pair that a model card's template joins loses the end of the document, as in TemplateReader.
    follows_tokenizer = template is None or template.by_messages
    cuts_left = follows_tokenizer and parts["tokenizer"].truncation_side == "left"
    return LoadedModel(
        name=config.model or EMBEDDED_MODEL,
        score_type=score_type,
        max_tokens=longest,
        uncounted_id=uncounted_id(backbone),
        takes_type_ids=takes_type_ids(backbone, parts["tokenizer"]),
        architecture=files.architecture,
        file_dtype=next(backbone.parameters()).dtype,
        truncation_side="left" if cuts_left else "right",
        **parts,
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silences progress bars, reports of weights that belong to a head and not to the backbone, and warnings
    that a checkpoint of PyLate is converted. While offline, also silences the hub's warnings, because the log
    has said so."""
    hub_verbosity = hub_logging.get_verbosity()
    if hub_constants.HF_HUB_OFFLINE:
        hub_logging.set_verbosity(logging.ERROR)
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with without_messages("base.model", "Converting "):
            yield
    finally:
        hub_logging.set_verbosity(hub_verbosity)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _check_projection(path: str, revision: str | None, projection: str, parts: dict[str, Any]) -> None:
    """Raises ModelLoadError where the modules lack the projection of a colpali-engine model or of Stanford's
    ColBERT, or differ."""
    modules = modules_of(parts["tasks"][parts["score_task"]].head)
    dense = [module for module in modules if isinstance(module, Dense)]
    if not dense:
        raise ModelLoadError(
            f"{path!r} has no module for its projection {projection}, which would be left out"
        )
    linear = dense[0].linear
    for name, tensor in read_tensors(path, revision, f"{projection}.").items():
        ours = linear.weight if name == "weight" else linear.bias
        if ours is None or ours.shape != tensor.shape:
            raise ModelLoadError(f"{path!r} has modules that do not fit its projection {projection}.{name}")
        if not torch.allclose(ours.float().cpu(), tensor.float(), atol=1e-2, rtol=1e-2):
            raise ModelLoadError(f"{path!r} has modules with another projection than its {projection}.{name}")


def _check_direction(path: str, files: CheckpointFiles, causal: bool, runs_own_code: bool) -> None:
    """Compares what a checkpoint says of its direction with what its model does. Raises ModelLoadError where
    they differ, and logs a warning where a causal model has code of its own that is not run and that might
    read otherwise."""
    if says_both_ways(files.config) and causal:
        raise ModelLoadError(
            f"{path!r} says that it reads in both directions, and its {files.architecture} reads in one "
            "here; name a model of which transformers' class can be run without a causal mask"
        )
    if files.config.get("is_causal") is True and not causal:
        raise ModelLoadError(
            f"{path!r} says that it is causal, and its {files.architecture} is not; take is_causal out of "
            "its config.json if that is wrong"
        )
    mapped = files.config.get("auto_map")
    named = isinstance(mapped, dict) and any(str(kind).startswith("AutoModel") for kind in mapped)
    is_translated = language_model_translation(files.config) is not None
    is_read_alike = runs_own_code or is_translated or files.architecture in (LISTWISE, JINA_M0)
    if causal and named and not is_read_alike:
        log.warning(
            "%s comes with code of its own, which is not run: transformers' class reads it, in one direction;"
            ' say "is_causal": false in its config.json if its own code reads in both',
            path,
        )


def _refuse_too_many_layers(model: str, config: dict[str, Any]) -> None:
    """Raises ModelLoadError for more layers than any model has: all are made before the weights are read."""
    parts = {"": config, **{f"{name}.": part for name, part in config.items() if isinstance(part, dict)}}
    for prefix, part in parts.items():
        for name in _LAYERS:
            count = part.get(name)
            if isinstance(count, int) and count > _MOST_LAYERS:
                raise ModelLoadError(
                    f"config.json of {model!r} sets {prefix}{name} to {count:,}; at most {_MOST_LAYERS:,} "
                    "layers are supported"
                )


def refuse_unsupported(
    model: str, files: CheckpointFiles, score_type: ScoreType, trust_remote_code: bool
) -> None:
    """Raises ModelLoadError for an architecture that transformers does not have, for one that cannot be
    scored with as asked, and for weights that are quantized."""
    kind = files.config.get("model_type")
    first = files.modules[0]["type"].rpartition(".")[2] if files.modules else ""
    if first == "Transformer" and not files.config:
        raise ModelLoadError(f"{model!r} has no config.json of its Transformer; download it whole")
    has_other = first in UNSUPPORTED_MODULES and not has_two_towers(files)  # CLIPModel
    if has_other or (files.modules and not files.config):
        raise ModelLoadError(
            f"modules.json of {model!r} begins with a {first}, not a transformer, which is not supported; "
            "name a version with a transformer, or use sentence-transformers for it"
        )
    has_own_code = trust_remote_code and "auto_map" in files.config
    # Other keys tell the type of some published checkpoints with code of their own.
    if not kind and not runs_as(files) and not has_own_code:
        likely = getattr(getattr(transformers, files.architecture, None), "config_class", None)
        add = f'add "model_type": "{likely.model_type}"' if likely else "add that of its architecture"
        raise ModelLoadError(f"config.json of {model!r} has no model_type; {add}, or download it again")
    if is_visual(files) and files.architecture not in RETRIEVAL:
        raise ModelLoadError(
            f"{model!r} is a {files.architecture}; of such models {', '.join(RETRIEVAL)} can be served"
        )
    if is_visual(files) and score_type is not ScoreType.LATE_INTERACTION:
        raise ModelLoadError(f"{model!r} is a {files.architecture}, which scores by late interaction alone")
    if files.architecture in COLPALI_ENGINE and not (files.modules and reads_pictures(files)):
        raise ModelLoadError(
            f"{model!r} is a {files.architecture} as colpali-engine saves it, which does not say how queries "
            f"are written; name a version with sentence-transformers' modules, or a {' or '.join(RETRIEVAL)}"
        )
    is_bare = not files.modules and not is_visual(files) and files.architecture != JINA_M0
    if reads_pictures(files) and is_bare:
        raise ModelLoadError(
            f"{model!r} is a {kind} without a prompt format and a pooling; name a "
            "version with sentence-transformers' modules"
        )
    if not trust_remote_code and runs_as(files) not in CONFIG_MAPPING:
        raise ModelLoadError(_unknown_type(model, files))
    read_apart = files.architecture in (LISTWISE, JINA_M0, STANFORD) or is_visual(files)
    if format_of(model, files) is not None and read_apart:
        raise ModelLoadError(
            f"the weights of {model!r} are quantized, which is not supported for a {files.architecture}; "
            "name the checkpoint that it was made from"
        )
    if kind == "reformer" and (not files.config.get("num_buckets") or files.config.get("hash_seed") is None):
        raise ModelLoadError(
            f"{model!r} is a Reformer whose config lacks num_buckets or hash_seed: the first text that it is "
            "given would decide how it reads all others, and chance how it reads each; set both"
        )
    if is_bare and is_language_model(files) and says_both_ways(files.config):
        raise ModelLoadError(
            f"{model!r} reads in both directions, so that it has no next word to answer with, and does not "
            "say how its states are pooled; name a version with sentence-transformers' modules"
        )
    _refuse_score_type(model, files, score_type)


def _unknown_type(model: str, files: CheckpointFiles) -> str:
    """The message for a type of model that this version of transformers lacks."""
    kind, read_as = files.config.get("model_type"), runs_as(files)
    what = f"{model!r} is a {files.architecture} of type {kind!r}"
    if files.architecture == "unknown":
        what = f"{model!r} has a config.json with the model_type {kind!r} and no architecture"
    here = f"transformers {transformers.__version__}"
    has_code = "auto_map" in files.config
    code = " It comes with code of its own, which trust_remote_code=True would run." if has_code else ""
    if read_as != kind:
        return f"{what}, which is read as {read_as!r}; {here} does not have that, a newer one does.{code}"
    return f"{what}, which {here} does not have.{code} Supported are {supported_architectures()}"


def _refuse_score_type(model: str, files: CheckpointFiles, score_type: ScoreType) -> None:
    """Raises ModelLoadError for an architecture that is not scored so."""
    if files.architecture in (LLAMA_RERANKER, *LAYERWISE) and score_type is not ScoreType.CROSS_ENCODER:
        raise ModelLoadError(f"{model!r} is a {files.architecture}, which can be a cross-encoder alone")
    if has_two_towers(files) and score_type is not ScoreType.BI_ENCODER:
        raise ModelLoadError(f"{model!r} is a {files.architecture}, which can be a bi-encoder alone")
    reads_pairs = files.architecture.endswith("ForSequenceClassification") or files.architecture == JINA_M0
    reads_pairs |= is_language_model(files) or answers_in_words(files) or scores_pooled(files)
    reads_pairs |= files.architecture in ENCODER_DECODERS and not files.modules
    if score_type is ScoreType.CROSS_ENCODER and not reads_pairs:
        raise ModelLoadError(
            f"{model!r} is a {files.architecture}, which has no classifier to score pairs with; "
            'load it with score_type="bi-encoder" or "late-interaction", or name a '
            "*ForSequenceClassification checkpoint"
        )
    if score_type is ScoreType.LANGUAGE_MODEL and (
        not is_language_model(files) or says_both_ways(files.config) or files.architecture in LAYERWISE
    ):
        raise ModelLoadError(
            f"{model!r} is a {files.architecture}, which does not say what comes next in a text; "
            'score_type="language-model" is for *ForCausalLM checkpoints that read in one direction'
        )
    if score_type is ScoreType.LANGUAGE_MODEL and files.config.get(ANSWERS_ALONE):
        raise ModelLoadError(
            f"{model!r} has no more of its output layer than the rows of yes and no; name the model that it "
            "was made from"
        )
    if score_type is ScoreType.LISTWISE and files.architecture != LISTWISE:
        raise ModelLoadError(f"{model!r} is a {files.architecture}; listwise scoring needs a {LISTWISE}")
