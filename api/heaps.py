"""The heaps of the C library (glibc), from which all threads get memory of more than a few hundred bytes."""

import ctypes
import os

# See mallopt(3).
_M_ARENA_MAX = -8
_LEAST = 2


def share_heaps(threads: int) -> None:
    """Has threads share heaps, of which there are no more from now on than `threads` that can run at the same
    time, unless the environment says how many. By default there are up to eight for each core of the machine,
    and each has gaps of its own: under `tests.chaos fuzz` a server grows by half as much with two."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, max(_LEAST, threads))
