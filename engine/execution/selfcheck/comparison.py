"""Numbers beside those that are expected: how far off they are, and how far they may be."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# How far an item may be from the library's, as a share of the largest number in any.
TOLERANCE = 1e-5
# What rounding alone explains is allowed for so many times over.
_TIMES = 4.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Items against those expected: how many sequences, the largest difference, the largest number expected,
    and how large a difference rounding alone explains. A difference of NaN is one."""

    sequences: int
    difference: float
    largest: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance < math.inf

    def __str__(self) -> str:
        return f"{self.sequences} sequences, largest difference {self.difference:.1e} of {self.largest:.3g}"


def comparison(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], rounding: float, share: float = TOLERANCE
) -> Comparison:
    """The items in `found` against those expected: `share` says how far they may be off, of the largest, and
    `rounding` how far in any case."""
    size = largest(expected)
    if any(item.shape != wanted.shape for item, wanted in zip(found, expected, strict=True)):
        return Comparison(len(found), float("inf"), size, 0.0)
    difference = largest(item - wanted for item, wanted in zip(found, expected, strict=True))
    return Comparison(len(found), difference, size, share * size + _TIMES * rounding)


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest absolute number in some tensors, NaN where one is: Python's own `max` would drop it."""
    numbers = [tensor.abs().max().float().cpu() for tensor in tensors if tensor.numel()]
    return float(torch.stack(numbers).max()) if numbers else 0.0
