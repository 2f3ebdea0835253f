"""The one form of everything ragged: flat rows plus offsets that the CPU knows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

# As float32 this many rows of a few hundred dimensions stay in a CPU's cache.
_DECODED_TOGETHER = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Items of different lengths laid end to end: item i is `values[offsets[i]:offsets[i + 1]]`.

    `values` is [rows, dim]; `offsets` has one entry more than there are items and starts at 0. With `scales`,
    float32 [rows], the values are int8, and stand for themselves times their row's scale.
    """

    values: torch.Tensor
    offsets: tuple[int, ...]
    scales: torch.Tensor | None = None

    @classmethod
    def from_lengths(cls, values: torch.Tensor, lengths: Sequence[int]) -> "Ragged":
        return cls(values, (0, *accumulate(lengths)))

    @classmethod
    def from_items(cls, items: Sequence[torch.Tensor]) -> "Ragged":
        return cls.from_lengths(torch.cat(list(items)), [len(item) for item in items])

    @classmethod
    def join(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """The items of all parts, one after the other; either all parts have scales or none has."""
        lengths = [length for part in parts for length in part.lengths]
        scales = [part.scales for part in parts if part.scales is not None]
        values = torch.cat([part.values for part in parts])
        return cls(values, (0, *accumulate(lengths)), torch.cat(scales) if scales else None)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def item(self, index: int) -> "Ragged":
        """One item by itself, with its scales."""
        start, stop = self.offsets[index : index + 2]
        scales = None if self.scales is None else self.scales[start:stop]
        return Ragged(self.values[start:stop], (0, stop - start), scales)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.values.split(self.lengths))

    def decoded(self, dtype: torch.dtype) -> "Ragged":
        """The same in a precision that can be computed with, without scales."""
        if self.scales is None:
            return Ragged(self.values.to(dtype), self.offsets)
        if self.values.device.type != "cpu":
            return Ragged((self.values * self.scales[:, None]).to(dtype), self.offsets)
        decoded = torch.empty(self.values.shape, dtype=dtype)
        for first in range(0, len(decoded), _DECODED_TOGETHER):
            rows = slice(first, first + _DECODED_TOGETHER)
            decoded[rows] = self.values[rows] * self.scales[rows, None]
        return Ragged(decoded, self.offsets)

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.offsets)]
