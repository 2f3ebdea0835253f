"""Memory for weights in large pages. A product streams its weights from memory, and with pages of 4 KiB it
waits for the translation of their addresses."""

import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch

_LARGE_PAGE = 2 << 20
# Weights of a layer lie side by side in mappings of this size, so that no large page holds only one of them.
_MAPPING = 64 << 20
_LINE = 64  # bytes


class _Mappings:
    """The mapping that tensors are put into until it is full. It is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def take(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """A mapping with so many bytes from an offset on, which is a multiple of a cache line."""
        with self._lock:
            current = None if self._current is None else self._current()
            if current is None or self._used + nbytes > len(current):
                size = max(_MAPPING, nbytes + _LARGE_PAGE)
                current = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                current.madvise(mmap.MADV_HUGEPAGE)
                address = torch.frombuffer(current, dtype=torch.uint8).data_ptr()
                self._current, self._used = weakref.ref(current), -address % _LARGE_PAGE
            offset = self._used
            self._used += -(-nbytes // _LINE) * _LINE
            return current, offset


_MAPPINGS = _Mappings()


def empty_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor in large pages, if the system has them, that starts at a cache line. Takes no
    memory before it is written to."""
    count = math.prod(shape)
    if count == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype)
    try:
        mapping, offset = _MAPPINGS.take(count * dtype.itemsize)
    except OSError:  # a kernel without large pages, or a limit of mappings
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(*shape)
