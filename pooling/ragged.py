"""The one form of everything ragged: flat rows plus offsets that the CPU knows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Items of different lengths laid end to end: item i is `values[offsets[i]:offsets[i + 1]]`.

    `values` is [rows, dim]; `offsets` has one entry more than there are items and starts at 0.
    """

    values: torch.Tensor
    offsets: tuple[int, ...]

    @classmethod
    def from_lengths(cls, values: torch.Tensor, lengths: Sequence[int]) -> "Ragged":
        return cls(values, (0, *accumulate(lengths)))

    @classmethod
    def from_items(cls, items: Sequence[torch.Tensor]) -> "Ragged":
        return cls.from_lengths(torch.cat(list(items)), [len(item) for item in items])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.values.split(self.lengths))

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.offsets)]
