"""Comparison of items with those expected: how far they differ, and how far they may."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# How far an item may be from the library's, as a share of the largest number expected.
TOLERANCE = 1e-5
# A difference may be this many times what rounding alone explains.
_ROUNDING_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Items against those expected: the number of sequences, the largest difference, the largest number
    expected, and the largest difference that is tolerated. A difference of NaN does not agree."""

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
    """The items in `found` against those expected. They may differ by `share` of the largest number expected,
    and by a few times `rounding`, the difference that rounding alone explains."""
    size = largest(expected)
    if any(item.shape != wanted.shape for item, wanted in zip(found, expected, strict=True)):
        return Comparison(len(found), float("inf"), size, 0.0)
    difference = largest(item - wanted for item, wanted in zip(found, expected, strict=True))
    return Comparison(len(found), difference, size, share * size + _ROUNDING_FACTOR * rounding)


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest absolute number in some tensors, NaN if there is one: Python's own `max` would drop it."""
    numbers = [tensor.abs().max().float().cpu() for tensor in tensors if tensor.numel()]
    return float(torch.stack(numbers).max()) if numbers else 0.0
