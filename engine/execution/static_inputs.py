"""Numbers that a CUDA graph reads: tensors at addresses that stay the same, filled by one copy a step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

# As torch aligns what it allocates: kernels are compiled for addresses that are multiples of 16.
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor: its shape and type of number."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StaticInputs:
    """Owns one buffer on the device, of which `tensors` are views by name."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        self._offsets: dict[str, int] = {}
        self._fields = dict(fields)
        size = 0
        for name, field in fields.items():
            self._offsets[name] = size
            size += -(-field.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._buffer)

    def load(self, contents: Mapping[str, NDArray[np.generic]]) -> None:
        """Replaces the contents of all tensors: arrays of their types, which may be shorter and are followed
        by zeros. The copy runs after what was launched before, and nobody waits for it. Raises KeyError for a
        tensor that is left out."""
        # Pinned memory that is freed here is not used again before the copy is done.
        host = torch.zeros(self._buffer.shape, dtype=torch.uint8, pin_memory=self._buffer.is_cuda)
        for name, tensor in self._views(host).items():
            array = contents[name]
            tensor[: len(array)] = torch.from_numpy(array)
        self._buffer.copy_(host, non_blocking=True)

    def _views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: buffer[start : start + self._fields[name].nbytes]
            .view(self._fields[name].dtype)
            .view(self._fields[name].shape)
            for name, start in self._offsets.items()
        }
