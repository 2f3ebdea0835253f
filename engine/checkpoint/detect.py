"""Tells what a checkpoint is from its small files, or from its tensors' names; and the table of what is
supported."""

from collections.abc import Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from maxsimd.engine.checkpoint.files import CheckpointFiles, find_file
from maxsimd.engine.checkpoint.weights import read_tensors, tensor_names
from maxsimd.engine.config import ScoreType

LISTWISE = "JinaForRanking"
LLAMA_RERANKER = "LlamaBidirectionalForSequenceClassification"
MINICPM, COST_WISE = "LayerWiseMiniCPMForCausalLM", "CostWiseGemmaForCausalLM"
LAYERWISE = (MINICPM, COST_WISE)
JINA_V5 = "JinaEmbeddingsV5Model"
JINA_M0 = "JinaVLForRanking"
# Stanford's ColBERT: a projection beside the encoder, and settings of its own.
STANFORD, STANFORD_PROJECTION = "HF_ColBERT", "linear.weight"
COLPALI, COLQWEN2 = "ColPaliForRetrieval", "ColQwen2ForRetrieval"
COLMODERNVBERT = "ColModernVBertForRetrieval"
# Bare ones are taken for rerankers: nothing in a checkpoint tells monoT5 from the T5 that it was made from.
ENCODER_DECODERS = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")
RETRIEVAL = (COLPALI, COLQWEN2, COLMODERNVBERT)
# Keys of a config that only classifiers have, and the first parts of the names of their tensors.
_OF_CLASSIFIERS = ("id2label", "num_labels", "problem_type", "sbert_ce_default_activation_function")
_HEADS = frozenset({"classifier", "score", "classification_head", "logits_proj"})
_CLASSIFIER, _TOKEN_CLASSIFIER = "ForSequenceClassification", "ForTokenClassification"
# Alibaba's encoder: its classifier of tokens weighs words.
_ALIBABA = "NewForTokenClassification"
# The ends of names of classes without such a head.
_HEADLESS = ("Model", "ForMaskedLM")
# A number of labels by which the tensor with a row for each is found.
_LABELS = 13


def with_architecture(model: str, revision: str | None, files: CheckpointFiles) -> CheckpointFiles:
    """The files of a checkpoint. If its config names no class, or one without a head although there are the
    tensors of a classifier, the config gets the class that the tensors fit, and their number of labels."""
    named = files.config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    if first != STANFORD and _is_of_stanford(model, revision, files):
        return replace(files, config=files.config | {"architectures": [STANFORD]}, is_restated=True)
    if isinstance(first, str) and (files.modules or not first.endswith(_HEADLESS)):
        return files
    folder = "" if files.config_at_root else f"{files.modules[0].get('path', '')}/"
    names = _readable_names(model, revision, folder)
    if isinstance(first, str) and not any(name.split(".")[0] in _HEADS for name in names):
        return files
    found = _class_of(files.config, names)
    architecture = type(found).__name__ if found is not None else named
    if not isinstance(architecture, str) or not architecture:
        return files
    is_classifier = architecture.endswith(_CLASSIFIER)
    if isinstance(first, str) and not is_classifier:
        return files
    said: dict[str, Any] = {"architectures": [architecture]}
    if found is not None and is_classifier and files.config_at_root:
        said |= _labels(model, revision, found, names, files.config)
    return replace(files, config=files.config | said, is_restated=files.config_at_root)


def _is_of_stanford(model: str, revision: str | None, files: CheckpointFiles) -> bool:
    """Whether there are the settings and the projection of Stanford's ColBERT, which count whatever class is
    named."""
    if not files.config_at_root or saved_for_late_interaction(files):
        return False
    if find_file(model, "artifact.metadata", revision) is None:
        return False
    return STANFORD_PROJECTION in _readable_names(model, revision)


def _readable_names(model: str, revision: str | None, folder: str = "") -> frozenset[str]:
    try:
        return tensor_names(model, revision, folder)
    except Exception:  # what is wrong with the weights is said where they are read
        return frozenset()


def follow_stanford(files: CheckpointFiles) -> CheckpointFiles:
    """The files of a checkpoint that is scored by late interaction. Stanford's ColBERT has no modules where
    those in modules.json are not for late interaction: they would leave its projection and settings out."""
    if files.architecture != STANFORD or not files.config_at_root or saved_for_late_interaction(files):
        return files
    return replace(files, modules=[], is_restated=files.is_restated or bool(files.modules))


def _class_of(config: dict[str, Any], names: Set[str]) -> Any:
    """A model without weights, of `_LABELS` labels, whose class fits tensors of these names, or without names
    the config's keys; None for a type of model that transformers lacks."""
    import transformers

    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        return None
    # Encoders are found as causal models too, so those come later.
    kinds = ["ForSequenceClassification", "ForMaskedLM", "ForCausalLM", ""]
    if not names:
        kinds = [kinds[0], ""] if any(key in config for key in _OF_CLASSIFIERS) else [""]
    for kind in kinds:
        try:
            settings = {key: value for key, value in config.items() if key != "architectures"}
            settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(settings)
            settings.num_labels = _LABELS
            with torch.device("meta"):
                built = getattr(transformers, f"AutoModel{kind}").from_config(settings)
        except Exception:  # transformers has none
            continue
        if not kind or not names or _has_head(built, names):
            return built
    return None


def _has_head(model: Any, names: Set[str]) -> bool:
    """Whether a model's tensors that its base model lacks, and those of a pooler, are among the `names`.
    Where an output layer shares the embeddings, the prefix of the base model tells that there is one."""
    if model.base_model is model:
        return False
    prefix = f"{model.base_model_prefix}."
    pooler = f"{prefix}pooler."
    needed = {name for name in model.state_dict() if not name.startswith(prefix) or name.startswith(pooler)}
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        needed -= set(model._tied_weights_keys or ())
    # Old files name norms as TensorFlow did.
    there = {name.replace("LayerNorm.gamma", "LayerNorm.weight") for name in names}
    there |= {name.replace("LayerNorm.beta", "LayerNorm.bias") for name in names}
    return needed <= there and any(name.startswith(prefix) for name in names)


def _labels(
    model: str, revision: str | None, found: Any, names: Set[str], config: dict[str, Any]
) -> dict[str, Any]:
    """The labels of a classifier, if the config has not as many as the classifier's last layer has rows."""
    last = [name for name, tensor in found.state_dict().items() if tensor.shape[:1] == (_LABELS,)]
    rows = [each for name in last if name in names for each in read_tensors(model, revision, name).values()]
    if not rows or len(rows[0]) == type(found.config).from_dict(config | {"architectures": None}).num_labels:
        return {}
    id2label = {i: f"LABEL_{i}" for i in range(len(rows[0]))}
    return {"id2label": id2label, "label2id": {name: i for i, name in id2label.items()}}


# Keys of config_sentence_transformers.json that PyLate alone writes.
_OF_PYLATE = (
    *("document_prefix", "attend_to_expansion_tokens", "do_query_expansion"),
    *("skiplist_words", "query_length", "document_length"),
)


def detect_score_type(files: CheckpointFiles) -> ScoreType:
    """The score type that the checkpoint declares; a plain encoder is a bi-encoder, and a plain language
    model a cross-encoder that is asked about pairs."""
    if files.architecture == LISTWISE:
        return ScoreType.LISTWISE
    if is_late_interaction(files):
        return ScoreType.LATE_INTERACTION
    if is_sparse(files):
        return ScoreType.SPARSE
    if is_token_classifier(files):
        return ScoreType.TOKEN_CLASSIFIER
    classifies = files.architecture.endswith(_CLASSIFIER) and not _has_module(files, ".Pooling")
    answers = is_language_model(files) or files.architecture in ENCODER_DECODERS
    answers = (answers and not files.modules) or files.architecture == JINA_M0
    if files.sentence_transformers.get("model_type") == "CrossEncoder" or classifies or answers:
        return ScoreType.CROSS_ENCODER
    return ScoreType.BI_ENCODER


def is_late_interaction(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is for late interaction, by its settings or by its class."""
    return saved_for_late_interaction(files) or files.architecture == STANFORD or is_visual(files)


def saved_for_late_interaction(files: CheckpointFiles) -> bool:
    """Whether sentence-transformers or PyLate saved the checkpoint for late interaction. Early PyLate saves
    have no model_type, but settings and modules of their own."""
    settings = files.sentence_transformers
    if "query_prefix" in settings or "model_type" in settings:
        return "query_prefix" in settings or settings["model_type"] in ("MultiVectorEncoder", "ColBERT")
    of_pylate = any(str(module.get("type", "")).startswith("pylate.") for module in files.modules)
    return of_pylate or not settings.keys().isdisjoint(_OF_PYLATE)


def is_sparse(files: CheckpointFiles) -> bool:
    is_saved = files.sentence_transformers.get("model_type") == "SparseEncoder"
    return is_saved or _has_module(files, "SpladePooling")


def _has_module(files: CheckpointFiles, ending: str) -> bool:
    """Whether sentence-transformers' modules have one whose type has this ending."""
    return any(str(module.get("type", "")).endswith(ending) for module in files.modules)


def weighs_words(files: CheckpointFiles) -> bool:
    """Whether sparse scores can be made of the logits of a masked language model."""
    return is_sparse(files) or files.architecture.endswith("ForMaskedLM")


def is_token_classifier(files: CheckpointFiles) -> bool:
    """Whether the checkpoint labels tokens, as transformers saves such models."""
    labels_tokens = files.architecture.endswith(_TOKEN_CLASSIFIER) and files.architecture != _ALIBABA
    return labels_tokens and not files.modules


def is_visual(files: CheckpointFiles) -> bool:
    """Whether the checkpoint reads pages as pictures, as a `*ForRetrieval` class."""
    return files.architecture.endswith("ForRetrieval")


def answers_in_words(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is scored by the logits of words with which it answers about a pair."""
    return _has_module(files, "LogitScore")


def scores_pooled(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is a CrossEncoder that scores the pooled vector of a pair by modules."""
    is_saved = files.sentence_transformers.get("model_type") == "CrossEncoder"
    return is_saved and _has_module(files, ".Pooling")


def is_language_model(files: CheckpointFiles) -> bool:
    return files.architecture.endswith("ForCausalLM")


# Part of the names of classes that read in both directions: LlamaBidirectionalModel, Qwen3BidirectionalModel.
_BOTH_WAYS = "bidirec"


def says_both_ways(config: dict[str, Any]) -> bool:
    """Whether a checkpoint's config says that it reads in both directions, by a field or by the name of the
    class that it is run by."""
    if config.get("is_causal") is False or config.get("use_bidirectional_attention") is True:
        return True
    named, mapped = config.get("architectures"), config.get("auto_map")
    names = [config.get("model_type"), *(named if isinstance(named, list) else [])]
    if isinstance(mapped, dict):
        names += [name for kind, name in mapped.items() if str(kind).startswith("AutoModel")]
    return any(_BOTH_WAYS in str(name).lower() for name in names)


BI, CROSS, LATE = "bi-encoder", "cross-encoder", "late-interaction"
_OF_EMBEDDINGS = (BI, LATE)


@dataclass(frozen=True, slots=True)
class Kind:
    """Checkpoints whose config.json names one of the `architectures` (patterns, as of file names), how they
    can be scored, and in which form they are read."""

    architectures: tuple[str, ...]
    kinds: tuple[str, ...]
    form: str

    @property
    def named(self) -> str:
        return ", ".join(name for name in self.architectures if name != "*")


SUPPORTED = (
    Kind(
        ("NewModel", _ALIBABA),
        (BI, "sparse", LATE),
        "Alibaba's encoders, without the code that they come with; sparse scores where a layer that weighs "
        "tokens is among their weights",
    ),
    Kind(
        ("GteModel", "JinaBertModel", "JinaBertForMaskedLM", "NomicBertModel"),
        _OF_EMBEDDINGS,
        "Snowflake's, Jina's and Nomic's encoders, without the code that they come with",
    ),
    Kind(
        ("LlamaBidirectionalModel", "Lfm2BidirectionalModel"),
        _OF_EMBEDDINGS,
        "language models that read in both directions, without the code that they come with",
    ),
    Kind((JINA_V5,), _OF_EMBEDDINGS, "jina-embeddings-v5-text with its adapter for retrieval, or another"),
    Kind((LLAMA_RERANKER, *LAYERWISE), (CROSS,), "rerankers, without the code that they come with"),
    Kind(ENCODER_DECODERS, (CROSS, *_OF_EMBEDDINGS), "monoT5 and mT5 rerankers; the encoder alone"),
    Kind((LISTWISE,), ("listwise",), "jina-reranker-v3"),
    Kind((JINA_M0,), (CROSS,), "jina-reranker-m0, texts and pictures"),
    Kind(RETRIEVAL, (LATE,), "texts, and pages as pictures"),
    Kind((STANFORD,), (LATE,), "Stanford ColBERT saves"),
    Kind(("*ForSequenceClassification",), (CROSS,), "with transformers alone or as CrossEncoder saves"),
    Kind(
        ("*ForTokenClassification",),
        ("token-classifier", *_OF_EMBEDDINGS),
        "labels of tokens, such as named entities, with transformers alone",
    ),
    Kind(
        ("*ForCausalLM",),
        (CROSS, "language-model", *_OF_EMBEDDINGS),
        "language models that answer yes or no, or as a score template says; LogitScore saves; scores of the "
        "labels of a request",
    ),
    Kind(("*ForMaskedLM",), ("sparse", *_OF_EMBEDDINGS), "SPLADE, plain or as SparseEncoder saves"),
    Kind(
        ("XLMRobertaModel",),
        (BI, "sparse", LATE, "hybrid"),
        "all three embeddings of bge-m3, with its two layers beside it",
    ),
    Kind(
        ("*Model", "*ForConditionalGeneration", "*"),
        _OF_EMBEDDINGS,
        "all encoders and decoders that transformers has, alone or as saves of sentence-transformers "
        "(SentenceTransformer, MultiVectorEncoder) and PyLate",
    ),
)


def kind_of(architecture: str) -> Kind:
    """The first row that an architecture belongs to."""
    return next(
        row for row in SUPPORTED if any(fnmatchcase(architecture, name) for name in row.architectures)
    )


def kinds_as_lines() -> list[str]:
    kinds = max(len(", ".join(row.kinds)) for row in SUPPORTED)
    names = max(len(row.named) for row in SUPPORTED)
    return [f"{', '.join(row.kinds):<{kinds}}  {row.named:<{names}}  {row.form}" for row in SUPPORTED]


def supported_architectures() -> str:
    return ", ".join(row.named for row in SUPPORTED)
