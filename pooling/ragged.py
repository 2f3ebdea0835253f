"""Ragged items as flat rows, with offsets on the CPU, and copies between host and device."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

# This many float32 rows of a few hundred dimensions stay in a CPU's cache.
_DECODED_TOGETHER = 1024


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Ragged:
    """Items of different lengths, end to end: item i is `values[offsets[i]:offsets[i + 1]]`.

    `values` is [rows, dim]; `offsets` is int64 [items + 1] and starts at 0. With `scales`, float32 [rows],
    the values are int8, to be multiplied by their row's scale."""

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
        return cls(values, np.arange(len(values) + 1))

    @classmethod
    def join(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """The items of all parts, in order. Either all parts have scales or none has."""
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

    def take(self, indices: NDArray[np.int64] | Sequence[int]) -> "Ragged":
        """These items, in this order. Consecutive items are not copied."""
        wanted = np.asarray(indices, dtype=np.int64)
        cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
        runs = [self._run(int(run[0]), int(run[-1]) + 1) for run in np.split(wanted, cuts) if len(run)]
        if not runs:
            return self._run(0, 0)
        return runs[0] if len(runs) == 1 else Ragged.join(runs)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.values.split(self.lengths))

    def decoded(self, dtype: torch.dtype) -> "Ragged":
        """The items in a precision that can be computed with, without scales."""
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
    """Rows [n, dim], multiplied by their scales [n] if there are any, in `dtype`."""
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
    """The starts of items of these lengths, laid end to end, and the end of the last one."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(np.asarray(lengths, dtype=np.int64), out=offsets[1:])
    return offsets


# Pinned memory is expensive and stays with the process, so larger copies go through it in pieces.
_PIECE_BYTES = 32 * 1024 * 1024


def to_device(numbers: NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies host numbers to the device; on the CPU returns the numbers themselves. A CUDA device copies from
    pinned memory on its stream while the caller goes on. For other devices the caller waits."""
    tensor = numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies device numbers to the host. From CUDA the copy is complete once the work launched so far is
    done. For other devices the caller waits. On the CPU it returns the numbers themselves."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def joined_on(device: torch.device, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copies host tensors [rows, ...] end to end to the device, as `join_into`."""
    if device.type != "cuda":
        return torch.cat(list(parts)).to(device)
    out = torch.empty(
        sum(part.shape[0] for part in parts), *parts[0].shape[1:], dtype=parts[0].dtype, device=device
    )
    join_into(parts, out)
    return out


def join_into(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copies host tensors [rows, ...] end to end into `out`, of the same rows and precision, on a device. A
    GPU copies from pinned memory on its stream: a piece is joined there while the one before it is copied."""
    if out.device.type != "cuda":
        torch.cat(list(parts), out=out)
        return
    done = 0
    for together in runs((part.nbytes for part in parts), _PIECE_BYTES):
        piece = list(parts[together])
        rows = sum(part.shape[0] for part in piece)
        pinned = torch.empty(rows, *out.shape[1:], dtype=out.dtype, pin_memory=True)
        torch.cat(piece, out=pinned)
        out[done : done + rows].copy_(pinned, non_blocking=True)
        done += rows


def runs(sizes: Iterable[float], most: float, most_items: int | None = None) -> Iterator[slice]:
    """Divides items of these sizes into runs of at most `most` and `most_items`, or of one larger item."""
    first = count = 0
    together = 0.0
    for count, size in enumerate(sizes, 1):
        if count - 1 > first and (together + size > most or count - 1 - first == most_items):
            yield slice(first, count - 1)
            first, together = count - 1, 0
        together += size
    if count:
        yield slice(first, count)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Items anywhere among the rows of one tensor: item i is `values[starts[i]:stops[i]]`.

    `values` and `scales` are as in `Ragged`; the bounds are int64 [items], on the CPU. Items may overlap."""

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
