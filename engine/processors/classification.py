"""Classification: texts, or pairs of texts, to a score for each label."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.processors.processor import Plan
from maxsimd.engine.requests import ClassifyResult, Values
from maxsimd.pooling.methods import Head

# An activation gets this many rows at a time: torch may compute other bits for an incomplete vector.
_ROWS = 64


def classified(plan: Plan, values: Values, model: LoadedModel, use_activation: bool) -> ClassifyResult:
    """Makes probabilities of each text's logits, a row per text or pair; without the activation, logits."""
    scores = np.array(values.values, dtype=np.float32).reshape(len(values.values), -1)
    if use_activation:
        scores = activate(scores, model.probabilities)
    return ClassifyResult(scores, model.labels, plan.usage, plan.truncated, values.timings)


@lru_cache(maxsize=64)
def keeps_order(activation: Head) -> bool:
    """Whether a larger logit never has a smaller score, apart from rounding, for any function."""
    scores = activation(torch.linspace(-40, 40, 641, dtype=torch.float32)[:, None])  # [641, 1]
    return bool((scores.diff(dim=0) >= -1e-6).all())


def activate(logits: NDArray[np.float32], activation: Head) -> NDArray[np.float32]:
    """Applies an activation to logits [n, labels]. A row's bits do not depend on other rows."""
    filled = np.zeros((len(logits) + -len(logits) % _ROWS, logits.shape[1]), dtype=np.float32)
    filled[: len(logits)] = logits
    parts: Sequence[torch.Tensor] = [
        torch.from_numpy(filled[i : i + _ROWS]) for i in range(0, max(1, len(filled)), _ROWS)
    ]
    return np.concatenate([activation(part).numpy() for part in parts])[: len(logits)]
