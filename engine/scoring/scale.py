"""What a model's scores are: how they are made of what it computes, and between which bounds they lie."""

import math
from dataclasses import dataclass

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import ScoreType
from maxsimd.pooling.methods import Head

# Of a logit, more than any model gives.
_EXTREME = 1e30


@dataclass(frozen=True, slots=True)
class ScoreScale:
    """`transform` names what the score is: maxsim (the sum over the query's tokens of each one's best
    cosine), meanmaxsim (the mean), cosine, dot, euclidean or manhattan (the distance below 0), sparse (the
    dot product of sparse vectors) and sparse-cosine and the like, hybrid, or the activation of a classifier's
    logit, which is itself called logit; clipped says that negative ones are 0.
    `least` and `most` are None where there is no bound."""

    transform: str
    least: float | None
    most: float | None


def has_bounds(model: LoadedModel) -> bool:
    """Whether a model's scores have any: those of vectors of any length have none."""
    if model.score_task == "classify" or model.score_type is ScoreType.LISTWISE:
        return True
    if model.similarity in ("cosine", "sparse-cosine"):
        return True
    return model.tasks[model.score_task].normalised and model.similarity not in ("euclidean", "manhattan")


def score_scale(
    model: LoadedModel, *, use_activation: bool = True, normalize: bool = False, calibrated: bool = False
) -> ScoreScale:
    """The scale of the scores that a request with these options gets. Those that are normalised have bounds:
    a model whose scores have none does not give them. Where they are `calibrated`, they are probabilities."""
    if normalize and calibrated:
        return ScoreScale("calibrated probability", 0.0, 1.0)
    if model.score_task == "classify":
        if not (use_activation or normalize):
            return ScoreScale("logit", None, None)
        if model.score_label is not None:
            return _scale_of(torch.sigmoid)
        return _scale_of(model.probabilities if normalize else model.activation)
    transform = "cosine" if model.score_type is ScoreType.LISTWISE else model.similarity
    if normalize:
        return ScoreScale(f"clipped {'meanmaxsim' if transform == 'maxsim' else transform}", 0.0, 1.0)
    # The sum over a query's tokens is bounded by their number, which differs from query to query.
    if transform.removeprefix("sparse-") in ("euclidean", "manhattan"):
        return ScoreScale(transform, None, 0.0)
    if transform == "maxsim" or not has_bounds(model):
        return ScoreScale(transform, None, None)
    return ScoreScale(transform, -1.0, 1.0)


def _scale_of(activation: Head) -> ScoreScale:
    """Of an activation by what it makes of the least and the greatest logit."""
    ends = activation(torch.tensor([[-_EXTREME], [_EXTREME]], dtype=torch.float32)).flatten().tolist()
    least, most = (end if math.isfinite(end) and abs(end) < _EXTREME / 2 else None for end in ends)
    name = getattr(activation, "__name__", type(activation).__name__).lower()
    return ScoreScale("logit" if name == "identity" else name, least, most)
