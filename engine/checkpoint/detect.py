"""Finds out what a checkpoint is from its small files alone, before anything heavy is loaded."""

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.config import ScoreType

LISTWISE = "JinaForRanking"


def detect_score_type(files: CheckpointFiles) -> ScoreType:
    """What the checkpoint says of itself; a plain encoder is a bi-encoder, a plain language model one that
    is asked about pairs."""
    if files.architecture == LISTWISE:
        return ScoreType.LISTWISE
    if is_late_interaction(files):
        return ScoreType.LATE_INTERACTION
    classifies = files.architecture.endswith("ForSequenceClassification")
    answers = is_language_model(files) and not files.modules
    if files.sentence_transformers.get("model_type") == "CrossEncoder" or classifies or answers:
        return ScoreType.CROSS_ENCODER
    return ScoreType.BI_ENCODER


def is_late_interaction(files: CheckpointFiles) -> bool:
    """Whether it was saved for late interaction. PyLate wrote no model_type at first, but settings of its
    own."""
    settings = files.sentence_transformers
    return (
        settings.get("model_type") in ("MultiVectorEncoder", "ColBERT")
        or "query_prefix" in settings
        or files.architecture == "HF_ColBERT"
    )


def is_language_model(files: CheckpointFiles) -> bool:
    return files.architecture.endswith("ForCausalLM")
