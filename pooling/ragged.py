"""The one form of everything ragged: flat rows plus offsets that the CPU knows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

# As float32 this many rows of a few hundred dimensions stay in a CPU's cache.
_DECODED_TOGETHER = 1024


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Ragged:
    """Items of different lengths laid end to end: item i is `values[offsets[i]:offsets[i + 1]]`.

    `values` is [rows, dim]; `offsets`, int64, has one entry more than there are items and starts at 0. With
    `scales`, float32 [rows], the values are int8, and stand for themselves times their row's scale.
    """

    values: torch.Tensor
    offsets: NDArray[np.int64]
    scales: torch.Tensor | None

    def __init__(
        self,
        values: torch.Tensor,
        offsets: NDArray[np.int64] | Sequence[int],
        scales: torch.Tensor | None = None,
    ) -> None:
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "offsets", np.asarray(offsets, dtype=np.int64))
        object.__setattr__(self, "scales", scales)

    @classmethod
    def from_lengths(
        cls,
        values: torch.Tensor,
        lengths: NDArray[np.int64] | Sequence[int],
        scales: torch.Tensor | None = None,
    ) -> "Ragged":
        return cls(values, offsets_of(lengths), scales)

    @classmethod
    def from_items(cls, items: Sequence[torch.Tensor]) -> "Ragged":
        return cls.from_lengths(torch.cat(list(items)), [len(item) for item in items])

    @classmethod
    def one_row_each(cls, values: torch.Tensor) -> "Ragged":
        """Each row of `values` as an item by itself."""
        return cls(values, np.arange(len(values) + 1))

    @classmethod
    def join(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """The items of all parts, one after the other; either all parts have scales or none has."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        scales = [part.scales for part in parts if part.scales is not None]
        values = torch.cat([part.values for part in parts])
        return cls(values, offsets_of(lengths), torch.cat(scales) if scales else None)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        start, stop = self.offsets[index : index + 2].tolist()
        return self.values[start:stop]

    def item(self, index: int) -> "Ragged":
        """One item by itself, with its scales."""
        return self._run(index, index + 1)

    def take(self, indices: Sequence[int]) -> "Ragged":
        """These items, in this order. Where they follow one another here, they are not copied."""
        wanted = np.asarray(indices, dtype=np.int64)
        cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
        runs = [self._run(int(run[0]), int(run[-1]) + 1) for run in np.split(wanted, cuts) if len(run)]
        if not runs:
            return self._run(0, 0)
        return runs[0] if len(runs) == 1 else Ragged.join(runs)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.values.split(self.lengths))

    def decoded(self, dtype: torch.dtype) -> "Ragged":
        """The same in a precision that can be computed with, without scales."""
        return Ragged(decoded(self.values, self.scales, dtype), self.offsets)

    @property
    def lengths(self) -> list[int]:
        lengths: list[int] = np.diff(self.offsets).tolist()
        return lengths

    def _run(self, first: int, last: int) -> "Ragged":
        """The items `first` to `last` - 1, not copied."""
        offsets = self.offsets[first : last + 1]
        start, stop = int(offsets[0]), int(offsets[-1])
        scales = None if self.scales is None else self.scales[start:stop]
        return Ragged(self.values[start:stop], offsets - start, scales)


def decoded(values: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows [n, dim], times their scales [n] if they have any, in a precision that can be computed with."""
    if scales is None:
        return values.to(dtype)
    if values.device.type != "cpu":
        return (values * scales[:, None]).to(dtype)
    rows = torch.empty(values.shape, dtype=dtype)
    for first in range(0, len(rows), _DECODED_TOGETHER):
        together = slice(first, first + _DECODED_TOGETHER)
        rows[together] = values[together] * scales[together, None]
    return rows


def offsets_of(lengths: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    """Where items of these lengths begin when they lie end to end, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(np.asarray(lengths, dtype=np.int64), out=offsets[1:])
    return offsets
