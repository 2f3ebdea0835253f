"""Classification: texts, or pairs of texts, to a score for each label."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.processors.embedding import InputReader
from maxsimd.engine.processors.processor import (
    Plan,
    Processor,
    ProcessorContext,
    RequestIds,
    ScorePlan,
    ScoreProcessor,
)
from maxsimd.engine.requests import ClassifyResult, EmbedRequest, ScoreRequest, Values
from maxsimd.pooling.methods import Head

# An activation gets this many rows at a time: torch computes an incomplete vector of numbers in another way,
# which may differ in the last bit.
_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ClassificationPlan(Plan):
    """One value a text or pair: the logits of all labels. `pairs` is the plan of pairs."""

    model: LoadedModel
    pairs: ScorePlan | None = None

    def input_of(self, value: int) -> str:
        return f"input[{value}]" if self.pairs is None else self.pairs.input_of(value)

    def result(self, values: Values, use_activation: bool = True) -> ClassifyResult:
        """Makes one row per text: probabilities, or logits without the activation."""
        scores = np.array(values.values, dtype=np.float32).reshape(len(values.values), -1)
        if use_activation:
            scores = activate(scores, self.model.probabilities)
        return ClassifyResult(scores, self.model.labels, self.usage, self.truncated, values.timings)


class ClassificationProcessor(Processor[EmbedRequest, ClassificationPlan]):
    """Makes one sequence per text."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._inputs = InputReader(context)

    def prepare(self, request: EmbedRequest, ids: RequestIds) -> ClassificationPlan:
        built = self._inputs.read(request, ids)
        built = [replace(text, tokens=self._model.for_classifier(text.tokens)) for text in built]
        sequences = self._inputs.sequences(request, built, ids)
        return ClassificationPlan(
            sequences=sequences,
            num_values=len(sequences),
            truncated=sum(text.truncated for text in built),
            model=self._model,
        )


class PairClassificationProcessor(Processor[ScoreRequest, ClassificationPlan]):
    """Classifies pairs as the processor of `scores` reads them."""

    def __init__(self, context: ProcessorContext, scores: ScoreProcessor) -> None:
        super().__init__(context)
        self._scores = scores

    def prepare(self, request: ScoreRequest, ids: RequestIds) -> ClassificationPlan:
        pairs = self._scores.prepare(request, ids)
        return ClassificationPlan(
            sequences=pairs.sequences,
            num_values=pairs.num_values,
            truncated=pairs.truncated,
            images=pairs.images,
            model=self._model,
            pairs=pairs,
        )


@lru_cache(maxsize=64)
def keeps_order(activation: Head) -> bool:
    """Whether a larger logit never has a smaller score, apart from rounding. Tried on numbers: a
    checkpoint may name any function."""
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
