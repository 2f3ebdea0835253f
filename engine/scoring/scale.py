"""The scale of a model's scores: bounds, and probabilities fitted to judged documents."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import ScoreType
from maxsimd.pooling.methods import Head

# Above any model's logits.
_EXTREME = 1e30


@dataclass(frozen=True, slots=True)
class ScoreScale:
    """`transform` names what the score is: maxsim (sum over query tokens of the best cosine), meanmaxsim (the
    mean), cosine, dot, euclidean or manhattan (distances below 0), sparse and the like, hybrid, or a
    classifier's activation (logit: none). "clipped": negative scores are 0. None: unbounded."""

    transform: str
    least: float | None
    most: float | None


def has_bounds(model: LoadedModel) -> bool:
    """Whether a model's scores have bounds: those of vectors of any length have none."""
    if model.score_task == "classify" or model.score_type.scores_together:
        return True
    if model.similarity in ("cosine", "sparse-cosine"):
        return True
    return model.tasks[model.score_task].normalized and model.similarity not in ("euclidean", "manhattan")


def score_scale(
    model: LoadedModel, *, use_activation: bool = True, normalize: bool = False, calibrated: bool = False
) -> ScoreScale:
    """Returns the scale for a request with these options."""
    if normalize and calibrated:
        return ScoreScale("calibrated probability", 0.0, 1.0)
    if model.score_type is ScoreType.LANGUAGE_MODEL:
        return ScoreScale("rank", 0.0, 1.0)
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
    """Finds an activation's bounds from its values at the extremes."""
    ends = activation(torch.tensor([[-_EXTREME], [_EXTREME]], dtype=torch.float32)).flatten().tolist()
    least, most = (end if math.isfinite(end) and abs(end) < _EXTREME / 2 else None for end in ends)
    name = getattr(activation, "__name__", type(activation).__name__).lower()
    return ScoreScale("logit" if name == "identity" else name, least, most)


_FORMAT = "maxsimd calibration 1"


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Maps normalized `scores` to `probabilities`, both float64 [n] and ascending, linear in between. `model`
    is the digest of the model, and `judged` how many documents it was fitted to.

    Source: isotonic regression (Zadrozny and Elkan, KDD 2002)."""

    model: str
    scores: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    judged: int

    @classmethod
    def fitted(cls, model: str, scores: Sequence[float], relevant: Sequence[bool]) -> Self:
        """Fits normalized scores that are `relevant` or not. Raises ValueError if all are judged alike."""
        if len(set(relevant)) < 2:
            raise ValueError(
                "all documents are judged alike; give some that are relevant and some that are not"
            )
        from sklearn.isotonic import IsotonicRegression

        regression = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        regression.fit(np.asarray(scores, dtype=np.float64), np.asarray(relevant, dtype=np.float64))
        return cls(model, regression.X_thresholds_, regression.y_thresholds_, len(scores))

    def __call__(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns the probabilities of normalized scores [n]; NaN stays."""
        return np.interp(scores, self.scores, self.probabilities).astype(np.float32)

    def write(self, path: Path) -> None:
        page = {
            "format": _FORMAT,
            "model": self.model,
            "judged": self.judged,
            "scores": self.scores.tolist(),
            "probabilities": self.probabilities.tolist(),
        }
        path.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises OSError, and ValueError for a file that `write` did not write."""
        page = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(page, dict) or page.get("format") != _FORMAT:
            raise ValueError("it was not written by maxsimd calibrate")
        try:
            scores, probabilities = (
                np.asarray(page[name], dtype=np.float64) for name in ("scores", "probabilities")
            )
            model, judged = str(page["model"]), int(page["judged"])
        except (KeyError, TypeError, ValueError):
            raise ValueError("it lacks a field, or one of them does not hold numbers") from None
        if scores.ndim != 1 or scores.shape != probabilities.shape or not len(scores):
            raise ValueError("it does not have one probability for each score")
        rises = np.all(np.diff(scores) >= 0) and np.all(np.diff(probabilities) >= 0)
        if not rises or not 0 <= probabilities[0] <= probabilities[-1] <= 1:
            raise ValueError("its probabilities do not rise from 0 to 1 with the scores")
        return cls(model, scores, probabilities, judged)
