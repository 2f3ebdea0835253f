"""How the C allocator and oneDNN keep memory between the steps of a CPU engine, and when it goes back."""

import ctypes
import os
import sys

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30

# Compiled kernels that oneDNN keeps; its default of 1,024 can hold more than a gigabyte of them.
_ONEDNN_PRIMITIVES = "256"


def settle_allocators() -> None:
    """Lets freed blocks be used again by the next step instead of going back to the system.

    A step's temporaries are of many megabytes. By default each is mapped anew, and the page faults cost
    more than some of the arithmetic. Call it before the first matrix product; elsewhere than on Linux it
    only bounds oneDNN's cache."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _ONEDNN_PRIMITIVES)
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def give_back_memory() -> None:
    """Has the C library give the system what is free in its heaps, where it can (glibc): milliseconds, in
    which Python goes on in other threads."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
