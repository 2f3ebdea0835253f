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
_LONG = "MaxSim: one document of 8,192 tokens"
_LONG_DOCUMENTS = "MaxSim: published, 10,000 documents of 300 tokens"
_PAGES = "MaxSim: published, 1,000 pages of 1,024 tokens"
_LARGE = "attention: XLM-RoBERTa large, 8 x 2,048 tokens"
_QWEN = "attention: Qwen3 0.6B, 16 x 1,024 tokens"
_PROJECTION = "projection: 16,384 rows, 1,024 to 128"
_SERVING = "2,000 requests of one document, 64 at a time, 2,048 tokens"
_FASTER = "times_as_fast_as_the_best_other"

PREDICTIONS = (
    _least("limits: product_tflops", "TFLOP/s", 798, 788, _SEEN),
    _least("limits: copy_tbytes_per_s", "TB/s", 3.0, 4.3, _SEEN),
    _least("limits: read_tbytes_per_s", "TB/s", 3.1, 4.4, _PUBLISHED),
    _most("maxsim: cases that failed", "cases", 0, 0, _AIM),
    _most("attention: cases that failed", "cases", 0, 0, _AIM),
    _most("projection: cases that failed", "cases", 0, 0, _AIM),
    _most("layers: cases that failed", "cases", 0, 0, _AIM),
    _most("compiled: kernels with registers in memory", "kernels", 0, 0, _AIM),
    # The better package is to be within 10% of what it publishes, or else the harness is wrong.
    _most(f"{_LONG_DOCUMENTS}: late-interaction-kernels_ms", "ms", 0.2450, 0.172, _PUBLISHED),
    _most(f"{_LONG_DOCUMENTS}: flash-maxsim_ms", "ms", 0.2473, 0.174, _PUBLISHED),
    _most(f"{_PAGES}: late-interaction-kernels_ms", "ms", 0.6957, 0.6957, _PUBLISHED),
    _most(f"{_PAGES}: flash-maxsim_ms", "ms", 0.5684, 0.5684, _PUBLISHED),
    # 461 MB, of which nothing is read twice from memory.
    _most(f"{_COLBERT}: maxsimd_ms", "ms", 0.152, 0.107),
    _least(f"{_COLBERT}: {_FASTER}", "times", 0.97, 0.97, _AIM),
    _least(f"{_COLBERT}, in int8: times_as_fast_as_the_best_in_16_bits", "times", 1.6, 1.6, _AIM),
    # 134 GFLOP; the tile of 256 x 64 at two programs a multiprocessor.
    _most(f"{_COLPALI}: maxsimd_ms", "ms", 0.235, 0.235),
    _least(f"{_COLPALI}: tflops", "TFLOP/s", 570, 570),
    _least(f"{_COLPALI}: {_FASTER}", "times", 1.2, 1.2, _AIM),
    _least(f"{_QUERY_OF_64}: share_of_what_the_device_can", "share", 0.85, 0.85),
    _most(f"{_LONG}: maxsimd_ms", "ms", 0.006, 0.006),
    _least(f"{_LARGE}: tflops", "TFLOP/s", 450, 450),
    _least(f"{_QWEN}: tflops", "TFLOP/s", 350, 350),
    _most(f"{_PROJECTION}: maxsimd_ms", "ms", 0.014, 0.012),
    # XLM-RoBERTa large, with fused layers and attention at 400 to 500 TFLOP/s.
    _least("forward, auto, 16 x 1,024 tokens: tokens_per_s", "tokens/s", 748e3, 764e3),
    _least("forward, auto, 8 x 2,048 tokens: tokens_per_s", "tokens/s", 600e3, 620e3),
    _most("forward, auto, 16 x 1,024 tokens: host_share", "share", 1.0, 1.0, _AIM),
    _most("forward, auto, 16 x 1,024 tokens: launches_a_layer", "launches", 8, 8, _AIM),
    _most("forward, auto, 1 x 512 tokens: ms", "ms", 0.95, 0.9),
    _most("forward, auto, 2 x 1,024 tokens: ms", "ms", 3.4, 3.2),
    _most("forward, auto, 4 x 1,024 tokens: ms", "ms", 6.5, 6.2),
    _most("forward, without graphs, 1 x 512 tokens: host_ms", "ms", 6.5, 6.5),
    _least("forward, varlen, 16 x 1,024 tokens: tokens_per_s", "tokens/s", 575e3, 607e3),
    _least(f"{_SERVING}: tokens_per_s", "tokens/s", 331_638, 331_638, _PUBLISHED),
    _least(f"{_SERVING}: tokens_per_s", "tokens/s", 575e3, 660e3, _AIM),
    _least("trace: busy_share", "share", 0.97, 0.97, _AIM),
)
