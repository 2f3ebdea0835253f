"""What is run on the accelerator, and on the CPU beside it: a model of each kind of score."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.checkpoints import visual
from tests.parity.families import FAMILIES, LISTWISE

# Shares of the largest score by which the two may differ: rounding in float32, and of numbers in int8.
_ROUNDING, _OF_INT8 = 1e-4, 2e-2
_BY_NAME = {family.name: family for family in (*FAMILIES, LISTWISE)}


@dataclass(frozen=True, eq=False)
class Case:
    """A checkpoint, how it is built and loaded, and how far its scores may differ. `broken` is an operation
    that the device does wrong."""

    name: str
    build: Callable[[Path], str]
    settings: dict[str, Any] = field(default_factory=dict)
    tolerance: float = _ROUNDING
    broken: str | None = None


def _of(name: str, title: str | None = None, **others: Any) -> Case:
    family = _BY_NAME[name]
    settings = family.settings | others.pop("settings", {})
    return Case(title or name, family.build, settings, **others)


# The kinds of score, the ways to run a model, and pictures.
CASES = [
    _of("ColBERT"),
    _of("BERT"),
    _of("Qwen3"),
    _of("SPLADE"),
    _of("SGPT"),
    Case("colpali", visual.colpali),
]
OTHERS = [
    _of("ColBERT", "ColBERT in int8", settings={"cache_precision": "int8"}, tolerance=_OF_INT8),
    *(_of(name) for name in _BY_NAME if name not in {case.name for case in CASES}),
]
# A layer of the model, the maxima of MaxSim, and the sums of sparse scores.
BROKEN = [
    _of("BERT", "BERT, GELU is wrong", broken="aten::gelu"),
    _of("ColBERT", "ColBERT, maxima are wrong", broken="aten::scatter_reduce_"),
    _of("SPLADE", "SPLADE, sums are wrong", broken="aten::index_add_"),
]
