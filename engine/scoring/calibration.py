"""Scores as probabilities that a document is relevant, fitted to judged documents."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

_FORMAT = "maxsimd calibration 1"


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """The probability of each of some normalised `scores`, both float64 [n] and ascending; between two of
    them it goes straight. `model` is the digest of the model whose scores these are, and `judged` of how many
    documents they were fitted.

    Source: isotonic regression (Zadrozny and Elkan, "Transforming classifier scores into accurate multiclass
    probability estimates", KDD 2002)."""

    model: str
    scores: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    judged: int

    @classmethod
    def fitted(cls, model: str, scores: Sequence[float], relevant: Sequence[bool]) -> Self:
        """To documents of which each has a normalised score and is `relevant` or not. Raises ValueError where
        all are judged alike."""
        if len(set(relevant)) < 2:
            raise ValueError(
                "all documents are judged alike; give some that are relevant and some that are not"
            )
        from sklearn.isotonic import IsotonicRegression

        regression = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        regression.fit(np.asarray(scores, dtype=np.float64), np.asarray(relevant, dtype=np.float64))
        return cls(model, regression.X_thresholds_, regression.y_thresholds_, len(scores))

    def __call__(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """The probabilities of normalised scores [n]; NaN stays."""
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
        """Raises OSError, and ValueError for what `write` has not written."""
        page = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(page, dict) or page.get("format") != _FORMAT:
            raise ValueError("it is no file of maxsimd calibrate")
        try:
            scores, probabilities = (
                np.asarray(page[name], dtype=np.float64) for name in ("scores", "probabilities")
            )
            model, judged = str(page["model"]), int(page["judged"])
        except (KeyError, TypeError, ValueError):
            raise ValueError("it lacks something, or holds no numbers") from None
        if scores.ndim != 1 or scores.shape != probabilities.shape or not len(scores):
            raise ValueError("it has not one probability a score")
        rises = np.all(np.diff(scores) >= 0) and np.all(np.diff(probabilities) >= 0)
        if not rises or not 0 <= probabilities[0] <= probabilities[-1] <= 1:
            raise ValueError("its probabilities do not rise from 0 to 1 with the scores")
        return cls(model, scores, probabilities, judged)
