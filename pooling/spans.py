"""Items that lie anywhere among the rows of one tensor, such as those that were put there one by one."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.ragged import Ragged, offsets_of
from maxsimd.pooling.transfer import to_device


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Item i is `values[starts[i]:stops[i]]`: `values` is [rows, dim], the bounds are int64 [items], on the
    CPU. Rows may belong to several items or to none. With `scales`, float32 [rows], the values are int8, and
    stand for themselves times their row's scale."""

    values: torch.Tensor
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    scales: torch.Tensor | None = None

    @classmethod
    def of(cls, items: Ragged) -> Self:
        """The same items, where they lie."""
        return cls(items.values, items.offsets[:-1], items.offsets[1:], items.scales)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self.stops - self.starts
        return lengths

    def item(self, index: int) -> Ragged:
        """One item by itself, with its scales, not copied."""
        start, stop = int(self.starts[index]), int(self.stops[index])
        scales = None if self.scales is None else self.scales[start:stop]
        return Ragged(self.values[start:stop], (0, stop - start), scales)

    def gathered(self) -> Ragged:
        """A copy of the items, end to end."""
        lengths = self.lengths
        offsets = offsets_of(lengths)
        rows = np.repeat(self.starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        index = to_device(rows, self.values.device)
        scales = None if self.scales is None else self.scales.index_select(0, index)
        return Ragged(self.values.index_select(0, index), offsets, scales)
