"""Embeddings that callers bring."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[Any] | torch.Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """The embedding of a query or a document in place of its text: a numpy array or torch tensor,
    [tokens, dim] for late interaction and [dim] where a text has one vector, in float32, float16, bfloat16 or
    int8 (float64 becomes float32). int8 numbers are multiplied by `scales`, one per vector. Nothing is copied
    or checked until it is scored."""

    values: Numbers
    scales: Numbers | float | None = None

    def __len__(self) -> int:
        """The number of vectors; 1 if the values are no array."""
        try:
            if isinstance(self.values, torch.Tensor):  # `np.ndim` and `len` of one take several times longer
                shape = self.values.shape
                return shape[0] if len(shape) > 1 else 1
            return len(self.values) if np.ndim(self.values) > 1 else 1
        except (TypeError, ValueError):
            return 1

    @property
    def largest(self) -> float:
        """The largest magnitude of the numbers, times the largest scale."""
        scale = 1.0 if self.scales is None else _largest(_as_tensor(self.scales))
        return _largest(_as_tensor(self.values)) * scale

    def as_rows(self, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The vectors as contiguous rows [n, dim] on the CPU, perhaps not finite, with scales [n] if they are
        int8. Raises ValueError for another shape or kind of numbers, and for scales that are not finite."""
        rows = _as_tensor(self.values)
        if rows.dim() == 1:
            rows = rows[None]
        if rows.dim() != 2 or rows.shape[0] == 0 or rows.shape[1] != dim:
            raise ValueError(
                f"has the shape {list(rows.shape)}, but this model's vectors are [tokens, {dim}] or [{dim}]"
            )
        if rows.dtype == torch.float64:
            rows = rows.float()
        if rows.dtype not in _DTYPES:
            raise ValueError(f"is of {_name(rows.dtype)}; give {', '.join(map(_name, _DTYPES))}")
        return rows.contiguous(), self._checked_scales(rows)

    def _checked_scales(self, rows: torch.Tensor) -> torch.Tensor | None:
        if rows.dtype != torch.int8:
            if self.scales is not None:
                raise ValueError(f"is of {_name(rows.dtype)} and has scales; leave them out")
            return None
        if self.scales is None:
            return torch.ones(len(rows), dtype=torch.float32)
        scales = _as_tensor(self.scales).to(torch.float32).reshape(-1).contiguous()
        if len(scales) != len(rows):
            raise ValueError(f"has {len(scales)} scales for {len(rows)} vectors; give one per vector")
        if not scales.isfinite().all():
            raise ValueError("has a scale that is NaN or infinite")
        return scales


# An embedding as callers bring it.
Embedding: TypeAlias = Vectors | Numbers


def _as_tensor(values: Numbers | float) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    try:
        array = np.asarray(values)
        # torch shares no memory of another byte order or that runs backwards.
        if not (array.flags.c_contiguous and array.dtype.isnative):
            array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):
        raise ValueError("is not an array of numbers; give one of float32, [tokens, dim]") from None


def _largest(numbers: torch.Tensor) -> float:
    least, greatest = torch.aminmax(numbers)
    return max(-float(least), float(greatest))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
