"""Finds out what kind a checkpoint is from its small files alone, before anything heavy is loaded."""

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.config import ScoreType

LISTWISE = "JinaForRanking"
JINA_M0 = "JinaVLForRanking"
COLPALI, COLQWEN2 = "ColPaliForRetrieval", "ColQwen2ForRetrieval"
COLMODERNVBERT = "ColModernVBertForRetrieval"
# Bare ones are taken for rerankers: nothing in a checkpoint tells monoT5 from the T5 that it was made from.
ENCODER_DECODERS = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")
RETRIEVAL = (COLPALI, COLQWEN2, COLMODERNVBERT)


# Keys of config_sentence_transformers.json that PyLate alone writes.
_OF_PYLATE = frozenset(
    {
        *("query_prefix", "document_prefix", "attend_to_expansion_tokens", "do_query_expansion"),
        *("skiplist_words", "query_length", "document_length"),
    }
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
    classifies = files.architecture.endswith("ForSequenceClassification")
    answers = is_language_model(files) or files.architecture in ENCODER_DECODERS
    answers = (answers and not files.modules) or files.architecture == JINA_M0
    if files.sentence_transformers.get("model_type") == "CrossEncoder" or classifies or answers:
        return ScoreType.CROSS_ENCODER
    return ScoreType.BI_ENCODER


def is_late_interaction(files: CheckpointFiles) -> bool:
    """Whether the checkpoint was saved for late interaction. Early PyLate saves have no model_type, but
    settings and modules of their own."""
    settings = files.sentence_transformers
    return (
        settings.get("model_type") in ("MultiVectorEncoder", "ColBERT")
        or "query_prefix" in settings
        or ("model_type" not in settings and _is_of_pylate(files))
        or files.architecture == "HF_ColBERT"
        or is_visual(files)
    )


def _is_of_pylate(files: CheckpointFiles) -> bool:
    of_pylate = any(str(module.get("type", "")).startswith("pylate.") for module in files.modules)
    return of_pylate or not _OF_PYLATE.isdisjoint(files.sentence_transformers)


def is_sparse(files: CheckpointFiles) -> bool:
    """Whether the checkpoint was saved as a sparse encoder."""
    if files.sentence_transformers.get("model_type") == "SparseEncoder":
        return True
    return any(str(module.get("type", "")).endswith("SpladePooling") for module in files.modules)


def weighs_words(files: CheckpointFiles) -> bool:
    """Whether sparse scores can be made of the logits of a masked language model."""
    return is_sparse(files) or files.architecture.endswith("ForMaskedLM")


def is_visual(files: CheckpointFiles) -> bool:
    """Whether the checkpoint reads pages as pictures, in one of transformers' classes for that."""
    return files.architecture.endswith("ForRetrieval")


def answers_in_words(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is scored by the logits of words with which it answers about a pair."""
    return any(str(module.get("type", "")).endswith("LogitScore") for module in files.modules)


def scores_pooled(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is a CrossEncoder that scores the pooled vector of a pair by modules."""
    pools = any(str(module.get("type", "")).endswith(".Pooling") for module in files.modules)
    return pools and files.sentence_transformers.get("model_type") == "CrossEncoder"


def is_language_model(files: CheckpointFiles) -> bool:
    return files.architecture.endswith("ForCausalLM")
