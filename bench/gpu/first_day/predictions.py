"""What was predicted before anything ran on a GPU, and how a measurement stands beside it.

The numbers come from arithmetic on the shapes and on compiled code (`bounds.py`), from figures that others
published, or are aims. None is changed after a measurement: a table of misses is a result too.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from maxsimd.bench.gpu.first_day.found import Value

_ARITHMETIC, _PUBLISHED, _AIM = "arithmetic", "published", "aim"
_SEEN = "seen on such a GPU"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The number that a figure was predicted to reach (`at least`) or not to exceed (`at most`), on an H100
    and on an H200."""

    figure: str
    unit: str
    wanted: Literal["at least", "at most"]
    h100: float
    h200: float
    source: str

    def for_gpu(self, gpu: str) -> float:
        """The number for a GPU of this name; for any but an H200, that of the H100."""
        return self.h200 if "H200" in gpu else self.h100


@dataclass(frozen=True, slots=True)
class Row:
    """A prediction beside its measurement."""

    prediction: Prediction
    predicted: float
    measured: float

    @property
    def figure(self) -> str:
        return self.prediction.figure

    @property
    def ratio(self) -> float:
        """Of measured to predicted; of 0 to 0 it is 1."""
        if self.predicted == 0:
            return 1.0 if self.measured == 0 else math.inf
        return self.measured / self.predicted

    @property
    def is_met(self) -> bool:
        """By the number alone."""
        if self.prediction.wanted == "at least":
            return self.measured >= self.predicted
        return self.measured <= self.predicted


def rows_of(predictions: Iterable[Prediction], found: Mapping[str, Value], gpu: str) -> list[Row]:
    """The predictions of which `found` has the measurement."""
    rows = []
    for prediction in predictions:
        measured = found.get(prediction.figure)
        if isinstance(measured, int | float):
            rows.append(Row(prediction, prediction.for_gpu(gpu), float(measured)))
    return rows


def _least(figure: str, unit: str, h100: float, h200: float, source: str = _ARITHMETIC) -> Prediction:
    return Prediction(figure, unit, "at least", h100, h200, source)


def _most(figure: str, unit: str, h100: float, h200: float, source: str = _ARITHMETIC) -> Prediction:
    return Prediction(figure, unit, "at most", h100, h200, source)


_COLBERT = "MaxSim: ColBERT, 10,000 documents of 180 tokens"
_COLPALI = "MaxSim: ColPali, 500 pages of 1,024 tokens"
_QUERY_OF_64 = "MaxSim: a query of 64 tokens, 10,000 documents of 180"
_LONG_DOCUMENTS = "MaxSim: published, 10,000 documents of 300 tokens"
_PAGES = "MaxSim: published, 1,000 pages of 1,024 tokens"
_SERVING = "2,000 requests of one document, 64 at a time, 2,048 tokens"
_FASTER = "times_as_fast_as_the_best_other"

PREDICTIONS = (
    _least("limits: product_tflops", "TFLOP/s", 718, 788, _SEEN),
    _least("limits: copy_tbytes_per_s", "TB/s", 3.0, 4.3, _SEEN),
    _least("limits: read_tbytes_per_s", "TB/s", 3.1, 4.4, _PUBLISHED),
    _most("kernels: cases that failed", "cases", 0, 0, _AIM),
    # The better package is to be within 10% of what it publishes, or else the harness is wrong.
    _most(f"{_LONG_DOCUMENTS}: late-interaction-kernels_ms", "ms", 0.2450, 0.172, _PUBLISHED),
    _most(f"{_LONG_DOCUMENTS}: flash-maxsim_ms", "ms", 0.2473, 0.174, _PUBLISHED),
    _most(f"{_PAGES}: late-interaction-kernels_ms", "ms", 0.6957, 0.6957, _PUBLISHED),
    _most(f"{_PAGES}: flash-maxsim_ms", "ms", 0.5684, 0.5684, _PUBLISHED),
    # 461 MB, each byte read once from memory, and two dependent loads before the first tile.
    _most(f"{_COLBERT}: maxsimd_ms", "ms", 0.157, 0.112),
    _least(f"{_COLBERT}: {_FASTER}", "times", 1.0, 1.0, _AIM),
    _most(f"{_COLBERT}, in int8: maxsimd_ms", "ms", 0.105, 0.09),
    _least(f"{_COLBERT}, in int8: {_FASTER}", "times", 1.0, 1.0, _AIM),
    # 134 GFLOP. Predicted for a kernel that compared one tile while it multiplied the next; it was deleted.
    _most(f"{_COLPALI}: maxsimd_ms", "ms", 0.195, 0.195),
    _least(f"{_COLPALI}: {_FASTER}", "times", 1.3, 1.3, _AIM),
    _most(f"{_COLPALI}, in int8: maxsimd_ms", "ms", 0.21, 0.21),
    _least(f"{_COLPALI}, in int8: {_FASTER}", "times", 1.3, 1.3, _AIM),
    _most(f"{_QUERY_OF_64}: maxsimd_ms", "ms", 0.162, 0.125),
    _least(f"{_QUERY_OF_64}: {_FASTER}", "times", 1.0, 1.0, _AIM),
    # 24 layers: 9.9 TFLOP of products at 655 TFLOP/s, attention at 400 to 500, norms and one rotation.
    _least("forward, jina, as it is, 128 x 128 tokens: tokens_per_s", "tokens/s", 799e3, 830e3),
    _least("forward, jina, as it is, 32 x 512 tokens: tokens_per_s", "tokens/s", 759e3, 785e3),
    _least("forward, jina, as it is, 16 x 1,024 tokens: tokens_per_s", "tokens/s", 691e3, 712e3),
    _least("forward, jina, as it is, 8 x 2,048 tokens: tokens_per_s", "tokens/s", 594e3, 610e3),
    _most("forward, jina, as it is, 16 x 1,024 tokens: launches_a_layer", "launches", 9, 9, _AIM),
    _most("forward, jina, as it is, 1 x 512 tokens: ms", "ms", 1.6, 1.5),
    _most("forward, jina, as it is, 2 x 1,024 tokens: ms", "ms", 3.6, 3.5),
    _least("forward, xlm-roberta, as it is, 16 x 1,024 tokens: tokens_per_s", "tokens/s", 725e3, 745e3),
    _least("forward, xlm-roberta, as it is, 8 x 2,048 tokens: tokens_per_s", "tokens/s", 618e3, 635e3),
    _least(f"{_SERVING}: tokens_per_s", "tokens/s", 331_638, 331_638, _PUBLISHED),
    _least(f"{_SERVING}: tokens_per_s", "tokens/s", 620e3, 640e3),
    _most(f"{_SERVING}: p99_of_mean", "times", 1.3, 1.3, _AIM),
)
