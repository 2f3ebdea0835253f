"""Which architectures can be served, and the error messages for all others."""

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from maxsimd.engine.checkpoint.detect import (
    ENCODER_DECODERS,
    JINA_M0,
    LISTWISE,
    RETRIEVAL,
    answers_in_words,
    is_language_model,
    is_visual,
    scores_pooled,
)
from maxsimd.engine.checkpoint.direction import says_both_ways
from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.quantized.formats import format_of
from maxsimd.engine.checkpoint.retrained import LAYERWISE, LLAMA_RERANKER, retrained
from maxsimd.engine.checkpoint.served import in_a_sentence
from maxsimd.engine.checkpoint.translate import runs_as
from maxsimd.engine.checkpoint.visual.two_towers import has_two_towers
from maxsimd.engine.checkpoint.visual.vision_language import reads_pictures
from maxsimd.engine.config import ScoreType
from maxsimd.engine.errors import ModelLoadError

# colpali-engine's classes. Its saves have the names of their base models, to which sentence-transformers
# would add a random projection.
COLPALI_ENGINE = frozenset(
    {
        "ColGemma3",
        "ColIdefics3",
        "ColModernVBert",
        "ColPali",
        "ColQwen2",
        "ColQwen2_5",
        "ColQwen3",
        "ColQwen3_5",
    }
)


def refuse_unsupported(
    model: str, files: CheckpointFiles, score_type: ScoreType, trust_remote_code: bool
) -> None:
    """Raises ModelLoadError for an architecture that transformers does not have, for one that cannot be
    scored with as asked, and for weights that are quantised."""
    kind = files.config.get("model_type")
    if not files.config and files.modules:
        first = str(files.modules[0].get("type", "")).rsplit(".", 1)[-1]
        raise ModelLoadError(
            f"{model!r} begins with a {first}, not a transformer; supported are {in_a_sentence()}"
        )
    has_own_code = trust_remote_code and "auto_map" in files.config
    # Of some published checkpoints with code of their own the type is known by other keys.
    if not kind and not runs_as(files) and not has_own_code:
        likely = _type_of(files.architecture)
        add = f'add "model_type": "{likely}"' if likely else "add that of its architecture"
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
            f"{model!r} is a {kind} that says neither how it is asked nor what becomes of its states; name a "
            "version with sentence-transformers' modules"
        )
    is_retrained = files.config_at_root and retrained(files.config) is not None
    if not trust_remote_code and not is_retrained and runs_as(files) not in CONFIG_MAPPING:
        raise ModelLoadError(_unknown_type(model, files))
    read_apart = files.architecture in (LISTWISE, JINA_M0, "HF_ColBERT") or is_visual(files)
    if format_of(model, files) is not None and read_apart:
        raise ModelLoadError(
            f"the weights of {model!r} are quantised, which is not carried out for a {files.architecture}; "
            "name the checkpoint that it was made from"
        )
    if kind == "reformer" and (not files.config.get("num_buckets") or files.config.get("hash_seed") is None):
        raise ModelLoadError(
            f"{model!r} is a Reformer whose config lacks num_buckets or hash_seed: the first text that it is "
            "given would decide how it reads all others, and chance how it reads each; set both"
        )
    if is_bare and is_language_model(files) and says_both_ways(files):
        raise ModelLoadError(
            f"{model!r} reads in both directions, so that it has no next word to answer with, and does not "
            "say how its states are pooled; name a version with sentence-transformers' modules"
        )
    _refuse_score_type(model, files, score_type)


def _type_of(architecture: str) -> str | None:
    """The type of model that an architecture is of in transformers."""
    for name, mapping in vars(modeling_auto).items():
        if name.endswith("_MAPPING_NAMES"):
            for kind, named in mapping.items():
                if architecture in (named if isinstance(named, list | tuple) else (named,)):
                    return str(kind)
    return None


def _unknown_type(model: str, files: CheckpointFiles) -> str:
    """What is said of a type of model that this version of transformers does not have."""
    kind, read_as = files.config.get("model_type"), runs_as(files)
    what = f"{model!r} is a {files.architecture} of type {kind!r}"
    if files.architecture == "unknown":
        what = f"{model!r} has a config.json with the model_type {kind!r} and no architecture"
    here = f"transformers {transformers.__version__}"
    has_code = "auto_map" in files.config
    code = " It comes with code of its own, which trust_remote_code=True would run." if has_code else ""
    if read_as != kind:
        return f"{what}, which is read as {read_as!r}; {here} does not have that, a newer one does.{code}"
    return f"{what}, which {here} does not have.{code} Supported are {in_a_sentence()}"


def _refuse_score_type(model: str, files: CheckpointFiles, score_type: ScoreType) -> None:
    """Raises ModelLoadError for an architecture that is not scored so."""
    if files.architecture in (LLAMA_RERANKER, *LAYERWISE) and score_type is not ScoreType.CROSS_ENCODER:
        raise ModelLoadError(f"{model!r} is a {files.architecture}, which can be a cross-encoder alone")
    if has_two_towers(files) and score_type is not ScoreType.BI_ENCODER:
        raise ModelLoadError(f"{model!r} is a {files.architecture}, which can be a bi-encoder alone")
    if score_type is ScoreType.CROSS_ENCODER and not _reads_pairs(files):
        raise ModelLoadError(
            f"{model!r} is a {files.architecture}, which has no classifier to score pairs with; "
            'load it with score_type="bi-encoder" or "late-interaction", or name a '
            "*ForSequenceClassification checkpoint"
        )
    if score_type is ScoreType.LISTWISE and files.architecture != LISTWISE:
        raise ModelLoadError(f"{model!r} is a {files.architecture}; listwise scoring needs a {LISTWISE}")


def _reads_pairs(files: CheckpointFiles) -> bool:
    classifies = files.architecture.endswith("ForSequenceClassification")
    answers = is_language_model(files) or answers_in_words(files)
    first_word = files.architecture in ENCODER_DECODERS and not files.modules
    other = files.architecture == JINA_M0 or scores_pooled(files)
    return classifies or answers or first_word or other
