"""What this process has allocated and not given back, whatever the allocators keep of it from the system."""

import ctypes
import sys
from dataclasses import dataclass


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass(frozen=True, slots=True)
class Allocated:
    """`malloc_bytes` are in use in the C library's heaps and mappings (None without glibc 2.33), `blocks`
    are Python's objects of up to 512 bytes, which it keeps in memory of its own."""

    malloc_bytes: int | None
    blocks: int


def allocated() -> Allocated:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return Allocated(None, sys.getallocatedblocks())
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return Allocated(info.uordblks + info.hblkhd, sys.getallocatedblocks())
